"""LLaMA-Factory's inference files for `gym chat` and `gym api`: the model, one adapter and sampling."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.console import err
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.config.parsed import ParsedConfig


def is_file(name: str | Path | None) -> bool:
    """Return True if the model argument is a YAML file."""
    return name is not None and Path(name).suffix in (".yaml", ".yml") and Path(name).is_file()


def read(source: ParsedConfig | str | Path) -> dict[str, Any]:
    """Read ``model`` and ``sampling``, and ``system``, ``chat_template`` and ``dtype`` if given; print the notes.

    Raises:
        GymError: Errors of ``load_inference``; ``CONFIG_INVALID`` for more than one adapter.
    """
    from gym_fed.config.parsed import ParsedConfig
    from gym_fed.config.training_file import load_inference

    parsed = ParsedConfig.read(source)
    file = parsed.file
    values, notes = load_inference(parsed)
    for note in notes:
        err.print(f"note: {note}")
    adapters = values.pop("adapter")
    if len(adapters) > 1:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{file}: adapter_name_or_path: {counted(len(adapters), 'adapter')} cannot be combined when answering",
            "merge them first: gym export MODEL --adapter A --adapter B -o FOLDER",
        )
    if adapters:
        _require_base(str(file), adapters[0], values["model"])
        values["model"] = adapters[0]
    return values


def _require_base(file: str, adapter: str, model: str) -> None:
    """Refuse an adapter whose base differs from the file's model, since loading uses the adapter's base."""
    from gym_fed.base.modeling.adapters import read_adapter
    from gym_fed.base.models import resolve

    base = read_adapter(adapter, Path(resolve(adapter))).base
    if base is None or resolve(base) != resolve(model):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{file}: adapter_name_or_path: {adapter} was trained on {base}, not on {model}",
            f"merge it first: gym export {model} --adapter {adapter} -o FOLDER",
        )
