"""What is exported: a model in memory with what stands beside it, whatever it was named by."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_fed.base.files import CODE_KEYS
from gym_fed.base.modeling.adapters import Adapter, load_on, merge_adapters, merged
from gym_fed.base.modeling.rope import BASE_CHANGES
from gym_fed.base.models import (
    DTYPES,
    chain_on,
    folder_here,
    is_hub_name,
    load_model,
    model_name,
    quiet_loading,
    resolve,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import lies_in
from gym_fed.core.json_files import read_object
from gym_fed.core.text import readable_bytes
from gym_fed.delta.kept import LEAST_KEPT, mapped_base, share_kept

TRAVELS = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "COPYING*")
"""Texts of licences and notices, which go with every copy of a model."""
_MOST_LICENCE = 16 << 20
"""Bytes of one; they are read whole."""


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
        delta: The ``.gymdelta`` that was added to the weights; then the base in memory had ``below`` merged in.
        owned: Whether nobody else uses the model, so that merging and rounding may use it up.
        found: What formats have computed of this source and need again.
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
    delta: Path | None = None
    owned: bool = False
    found: dict[str, Any] = field(default_factory=dict, repr=False)
    _merged: Any = field(default=None, repr=False)

    @property
    def shown_name(self) -> str:
        """What files that are given away call it: no folder."""
        return _without_folders(self.name)

    @property
    def shown_base(self) -> str | None:
        """Likewise the base; None where there is none."""
        return None if self.base is None else _without_folders(self.base)

    @property
    def adapted(self) -> bool:
        """True if the model has an adapter that is not merged."""
        return hasattr(self.model, "peft_config")

    def whole(self) -> Any:
        """The model with everything in its weights; ``model`` stays as it is, or becomes this where it is owned.

        An adapter is merged in float32: a sum in 16 bits would round most of it away.
        """
        if self._merged is None and self.adapted:
            model = self.model if self.owned else copy.deepcopy(self.model)
            self._merged = merged(cast(model, "float32"), self.name)
            self.model = self._merged if self.owned else self.model
        return self.model if self._merged is None else self._merged

    def kept(self, dtype: str) -> float | None:
        """The share of the delta that is left in a dtype (``gym_fed.delta.kept``); None without a known base."""
        key = f"kept.{dtype}"
        if key not in self.found:
            self.found[key] = self._share(dtype)
        share: float | None = self.found[key]
        return share

    def precise_dtype(self) -> str:
        """The dtype to write by default: that of the base if it keeps the delta, otherwise float32."""
        share = self.kept(self.dtype)
        return self.dtype if share is None or share >= LEAST_KEPT else "float32"

    def _share(self, dtype: str) -> float | None:
        from gym_fed.delta.base import model_tensors

        if self.base is None or self.read_base is None:
            return None
        tuned = model_tensors(self.whole())
        here = folder_here(self.base)
        found = None if here is None else mapped_base(here, tuned)
        return share_kept(found or model_tensors(self.read_base()), tuned, dtype)

    def forget(self) -> None:
        """Give back the memory of ``whole``, and of the model where it is owned."""
        self._merged = None
        self.model = None if self.owned else self.model

    def write_beside(self, folder: Path) -> None:
        """Tokenizer (or processor), chat template, and the licence of the base; the last that is written there."""
        self.tokenizer.save_pretrained(str(folder))
        _name_no_code(folder)
        for name, file in licences_of(self).items():
            if not (folder / name).exists():
                shutil.copyfile(file, folder / name)


def cast(model: Any, dtype: str) -> Any:
    """The model itself, with its weights in another type. Rotary frequencies are never saved, and stay."""
    import torch

    for value in model.state_dict(keep_vars=True).values():
        if value.is_floating_point():
            value.data = value.data.to(getattr(torch, dtype))
    return model


def _without_folders(name: str) -> str:
    """``model_name``, of ``BASE:VARIANT`` for its base, and the last part of a path that is not on this machine."""
    base, colon, variant = name.rpartition(":")
    if colon and "/" not in variant and not Path(name).exists():
        return f"{_without_folders(base)}:{variant}"
    shown = model_name(name)
    return shown if is_hub_name(shown) else Path(shown).name


def _name_no_code(folder: Path) -> None:
    """Take out of the configs where Python files of the source lie: none of them travels, and programs that trust what
    they load (llama.cpp's converter among them) would run them from there."""
    for file in folder.glob("*config.json"):
        values = read_object(file)
        if not values.keys().isdisjoint(CODE_KEYS):
            kept = {key: value for key, value in values.items() if key not in CODE_KEYS}
            file.write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def licences_of(source: Source) -> dict[str, Path]:
    """Licences and notices of a model by their names; of two with one name the nearer one.

    Raises:
        GymError: ``MODEL_INVALID`` for a file of more than ``_MOST_LICENCE`` bytes, which is none.
    """
    found: dict[str, Path] = {}
    for pattern in TRAVELS:
        for place in source.folders:
            for file in sorted(place.glob(pattern)):
                if lies_in(file, place):
                    if file.stat().st_size > _MOST_LICENCE:
                        raise GymError(
                            ErrorCode.MODEL_INVALID,
                            f"{file}: a licence of {readable_bytes(file.stat().st_size)}",
                            "look at what it is; licences travel with every export",
                        )
                    found.setdefault(file.name, file)
    return found


def open_source(
    name: str,
    adapters: Sequence[str] = (),
    *,
    base: str | None = None,
    variant: str | None = None,
    variants: Path | None = None,
) -> Source:
    """The model called ``name`` with ``adapters`` on it and its delta added, in float32.

    Args:
        name: gym-nano, a model folder, the folder of a run or an adapter, or a name in the local cache;
            ``BASE:VARIANT`` or a ``.gymdelta`` as well.
        adapters: PEFT folders, put on in this order, below a delta.
        base: The base of a ``.gymdelta`` or an adapter; None for the one that it names.
        variant: A variant of the folder ``variants``, on ``name``.
        variants: See ``gym_fed.serving.store.naming.variants_folder``.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` or ``MODEL_INVALID``; ``CONFIG_INVALID`` for an adapter of another base;
            ``BASE_MISMATCH`` for a delta of one; ``USAGE`` for either on weights in few bits; as ``named_delta``.
    """
    from gym_fed.serving.store.naming import named_delta

    found = named_delta(name, base=base, variant=variant, store=variants)
    if found is not None:
        shown = name if variant is None else f"{name}:{variant}"
        return _with_delta(shown, found.base, adapters, found.delta)
    home_name, chain = chain_on(name, adapters) if base is None else chain_on(base, [name, *adapters])
    home = Path(resolve(home_name))
    _require_unquantised(home_name, home, chain)
    model, tokenizer = _load(home_name)
    stored = stored_dtype(home)
    if not chain:
        return Source(name, model, tokenizer, None, (), [home], stored, owned=True)
    with quiet_loading():
        model = load_on(merge_adapters(model, chain[:-1]), chain[-1])
    return Source(
        name,
        model.eval(),
        _template_of(chain, tokenizer),
        home_name,
        chain[:-1],
        _folders(chain, home),
        stored,
        _changes_base(chain),
        lambda: load_model(home_name).model,
        owned=True,
    )


def _with_delta(name: str, named_base: str, adapters: Sequence[str], delta: Path) -> Source:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.file import DeltaFile, apply_delta

    base, chain = chain_on(named_base, adapters)
    home = Path(resolve(base))
    _require_unquantised(base, home, chain, "a delta")
    loaded = load_model(base)
    with quiet_loading():
        model = merge_adapters(loaded.model, chain)
    with DeltaFile.open(delta, BaseSpec.of(model, model_name(base))) as opened:
        apply_delta(model, opened)
    return Source(
        name,
        model.eval(),
        _template_of(chain, loaded.tokenizer),
        base,
        chain,
        _folders(chain, home),
        stored_dtype(home),
        _changes_base(chain),
        lambda: load_model(base).model,
        delta,
        owned=True,
    )


def _folders(chain: Sequence[Adapter], home: Path) -> list[Path]:
    return [*(adapter.folder for adapter in reversed(chain)), home]


def _changes_base(chain: Sequence[Adapter]) -> bool:
    return any((adapter.folder / BASE_CHANGES).is_file() for adapter in chain)


def stored_dtype(home: Path) -> str:
    """The type that a model folder says its weights have; if its config does not, that of its first tensor."""
    values = read_object(home / "config.json")
    found = values.get("dtype") or values.get("torch_dtype") or _dtype_of_weights(home)
    return found if found in DTYPES else "float32"


def _dtype_of_weights(home: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    for file in sorted(home.glob("*.safetensors")):
        with suppress(SafetensorError), safe_open(file, "np") as tensors:
            name = next(iter(tensors.keys()))
            return {"BF16": "bfloat16", "F16": "float16"}.get(tensors.get_slice(name).get_dtype())
    return None


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


def _require_unquantised(base: str, home: Path, chain: Sequence[Adapter], delta: str = "") -> None:
    from gym_fed.training.model.quantization import prequantised

    method = prequantised(str(home))
    if method is not None and (chain or delta):
        remedy = "its --base" if delta else f"gym export UNQUANTISED-BASE --adapter {chain[-1].name}"
        raise GymError(
            ErrorCode.USAGE,
            f"{base} is quantised by {method}, and {delta or 'an adapter'} cannot be merged into that exactly",
            f"load the base unquantised: {remedy}",
        )
