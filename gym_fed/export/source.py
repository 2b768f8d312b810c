"""What is exported: a model in memory with what stands beside it, whatever it was named by."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.files import lies_in
from gym_fed.json_files import read_object
from gym_fed.modeling.adapters import Adapter, load_on, merge_adapters, merged
from gym_fed.modeling.rope import BASE_CHANGES
from gym_fed.models import DTYPES, chain_on, load_model, quiet_loading, resolve

TRAVELS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "COPYING*")
"""Texts of licences and notices, which go with every copy of a model."""


@dataclass
class Source:
    """A model to be exported.

    Attributes:
        name: What it was named by.
        model: A ``transformers`` model, or a PEFT model around one whose base has ``below`` merged in.
        tokenizer: Goes with it; a processor for a model that reads images.
        base: Name or folder of the base; None where the model is no tuned one.
        below: Adapters in the base's weights.
        folders: Where files that travel with the model are looked for, the nearest first.
        dtype: Type in which the base is on disk.
        base_changed: Whether the base in memory has other rotary positions than on disk.
        read_base: Reads the base again, without what was trained.
    """

    name: str
    model: Any
    tokenizer: Any
    base: str | None
    below: Sequence[Adapter] = ()
    folders: Sequence[Path] = ()
    dtype: str = "float32"
    base_changed: bool = False
    read_base: Callable[[], Any] | None = None
    _merged: Any = field(default=None, repr=False)

    @property
    def adapted(self) -> bool:
        """Whether the model has an adapter that is not merged."""
        return hasattr(self.model, "peft_config")

    def whole(self) -> Any:
        """The model with everything in its weights; ``model`` stays as it is."""
        if self._merged is None:
            self._merged = merged(copy.deepcopy(self.model), self.name) if self.adapted else self.model
        return self._merged

    def forget_merged(self) -> None:
        """Give back the memory of ``whole``."""
        self._merged = None

    def write_beside(self, folder: Path) -> None:
        """Tokenizer (or processor), chat template, and the licence of the base."""
        self.tokenizer.save_pretrained(str(folder))
        for pattern in TRAVELS:
            for place in self.folders:
                for file in sorted(place.glob(pattern)):
                    if lies_in(file, place) and not (folder / file.name).exists():
                        shutil.copyfile(file, folder / file.name)


def open_source(name: str, adapters: Sequence[str] = ()) -> Source:
    """The model called ``name`` with ``adapters`` on it, in float32.

    Args:
        name: gym-nano, a model folder, the folder of a run or an adapter, or a name in the local cache.
        adapters: PEFT folders, put on in this order.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` or ``MODEL_INVALID``; ``CONFIG_INVALID`` for an adapter of another base;
            ``USAGE`` for one on weights in few bits.
    """
    base, chain = chain_on(name, adapters)
    home = Path(resolve(base))
    _require_unquantised(base, home, chain)
    model, tokenizer = _load(base)
    stored = _stored_dtype(home)
    if not chain:
        return Source(name, model, tokenizer, None, (), [home], stored)
    with quiet_loading():
        model = load_on(merge_adapters(model, chain[:-1]), chain[-1])
    tokenizer = _template_of(chain, tokenizer)
    folders = [*(adapter.folder for adapter in reversed(chain)), home]
    changed = any((adapter.folder / BASE_CHANGES).is_file() for adapter in chain)
    return Source(
        name,
        model.eval(),
        tokenizer,
        base,
        chain[:-1],
        folders,
        stored,
        changed,
        lambda: load_model(base).model,
    )


def _stored_dtype(home: Path) -> str:
    """The type that a model folder says its weights have."""
    values = read_object(home / "config.json")
    found = values.get("dtype") or values.get("torch_dtype")
    return found if found in DTYPES else "float32"


def _load(name: str) -> tuple[Any, Any]:
    from gym_fed.training.vision.conversations import is_vision_model, load_vision_model

    if is_vision_model(name):
        return load_vision_model(name, dtype="float32", arguments={})
    loaded = load_model(name)
    return loaded.model, loaded.tokenizer


def _template_of(chain: Sequence[Adapter], tokenizer: Any) -> Any:
    """The base's tokenizer with the chat template that the last adapter was trained with."""
    for adapter in reversed(chain):
        file = adapter.folder / "chat_template.jinja"
        if file.is_file():
            tokenizer.chat_template = file.read_text(encoding="utf-8")
            break
    return tokenizer


def _require_unquantised(base: str, home: Path, chain: Sequence[Adapter]) -> None:
    from gym_fed.training.model.quantization import prequantised

    method = prequantised(str(home))
    if method is not None and chain:
        raise GymError(
            ErrorCode.USAGE,
            f"{base} is quantised by {method}, and an adapter cannot be merged into that exactly",
            f"load the base unquantised: gym export UNQUANTISED-BASE --adapter {chain[-1].name}",
        )
