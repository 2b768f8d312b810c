"""`gym chat` and `gym api` on a file of LLaMA-Factory: its model, its one adapter, and how it draws answers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.console import err
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_fed.config.parsed import ParsedConfig


def is_file(name: str | Path | None) -> bool:
    """True if the model is a YAML file."""
    return name is not None and Path(name).suffix in (".yaml", ".yml") and Path(name).is_file()


def read(source: ParsedConfig | str | Path) -> dict[str, Any]:
    """``model``, ``sampling``; where the file gives them ``system``, ``chat_template``, ``dtype``. Notes are printed.

    Raises:
        GymError: As ``load_inference``; ``CONFIG_INVALID`` for adapters that one model cannot stand for.
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
            f"{file}: adapter_name_or_path: {counted(len(adapters), 'adapter', 'are')} not put on while answering",
            "merge them first: gym export MODEL --adapter A --adapter B -o FOLDER",
        )
    if adapters:
        _require_base(str(file), adapters[0], values["model"])
        values["model"] = adapters[0]
    return values


def _require_base(file: str, adapter: str, model: str) -> None:
    """Refuse an adapter that names another base than the file does: loading takes the adapter's own."""
    from gym_fed.base.modeling.adapters import read_adapter
    from gym_fed.base.models import resolve

    base = read_adapter(adapter, Path(resolve(adapter))).base
    if base is None or resolve(base) != resolve(model):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{file}: adapter_name_or_path: {adapter} was trained on {base}, not on {model}",
            f"merge it first: gym export {model} --adapter {adapter} -o FOLDER",
        )
