"""The source of an export: a model in memory with everything that accompanies it."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_fed.base.files import CODE_KEYS, TRAVELS
from gym_fed.base.modeling.adapter_vocabulary import adapter_tokenizer
from gym_fed.base.modeling.adapters import Adapter, load_on, merge_adapters, merged
from gym_fed.base.modeling.rope import BASE_CHANGES
from gym_fed.base.models import (
    DTYPES,
    LoadedModel,
    chain_on,
    folder_here,
    is_hub_name,
    load_model,
    load_tokenizer,
    model_name,
    quiet_loading,
    resolve,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import lies_in
from gym_fed.core.json_files import read_object
from gym_fed.core.text import readable_bytes
from gym_fed.delta.kept import MIN_KEPT, mapped_base, share_kept

_MAX_LICENCE_BYTES = 16 << 20
"""Maximum size in bytes of a licence or notice file, which is read at once."""


@dataclass
class Source:
    """A model to be exported.

    Attributes:
        name: The name that the user gave.
        model: A ``transformers`` model, or a PEFT model around one whose base has ``below`` merged in.
        tokenizer: The tokenizer; a processor for a model that reads images.
        base: The name or folder of the base; None if the model is not tuned.
        below: The adapters merged into the base's weights.
        folders: Folders with files that accompany the model, nearest first.
        dtype: The dtype of the base on disk.
        base_changed: Whether the base's rotary positions in memory differ from those on disk.
        read_base: Function that loads the base again, without the trained changes.
        delta: The ``.gymdelta`` that was added to the weights; the base in memory then had ``below`` merged in.
        owned: Whether nobody else uses the model, so that merging and rounding may modify it.
        saving: Context manager that prepares the adapter for saving, since its form in training may differ.
        cache: Results that the formats compute once.
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
    saving: Callable[[Any], AbstractContextManager[object]] = nullcontext
    cache: dict[str, Any] = field(default_factory=dict, repr=False)
    _merged: Any = field(default=None, repr=False)

    @property
    def shown_name(self) -> str:
        """The model's name in published files, without folders."""
        return _without_folders(self.name)

    @property
    def shown_base(self) -> str | None:
        """The base's name in published files; None if there is none."""
        return None if self.base is None else _without_folders(self.base)

    @property
    def adapted(self) -> bool:
        """True if the model has an adapter that is not merged."""
        return hasattr(self.model, "peft_config")

    def whole(self) -> Any:
        """Return the model with everything merged into its weights; ``model`` is modified only if it is owned.

        An adapter is merged in float32, since a sum in 16 bits would round most of it away.
        """
        if self._merged is None and self.adapted:
            model = self.model if self.owned else copy.deepcopy(self.model)
            self._merged = merged(cast(model, "float32"), self.name)
            self.model = self._merged if self.owned else self.model
        return self.model if self._merged is None else self._merged

    def kept(self, dtype: str) -> float | None:
        """Return the share of the delta that a dtype keeps (``gym_fed.delta.kept``); None without a known base."""
        key = f"kept.{dtype}"
        if key not in self.cache:
            self.cache[key] = self._share(dtype)
        share: float | None = self.cache[key]
        return share

    def precise_dtype(self) -> str:
        """Return the default dtype: that of the base if it keeps the delta, otherwise float32."""
        share = self.kept(self.dtype)
        return self.dtype if share is None or share >= MIN_KEPT else "float32"

    def _share(self, dtype: str) -> float | None:
        from gym_fed.delta.base import model_tensors

        if self.base is None or self.read_base is None:
            return None
        tuned = model_tensors(self.whole())
        folder = folder_here(self.base)
        mapped = None if folder is None else mapped_base(folder, tuned)
        return share_kept(mapped or model_tensors(self.read_base()), tuned, dtype)

    def forget(self) -> None:
        """Free the memory of ``whole``, and of the model if it is owned."""
        self._merged = None
        self.model = None if self.owned else self.model

    def write_companions(self, folder: Path) -> None:
        """Write tokenizer (or processor), chat template, and the licences; called last."""
        self.tokenizer.save_pretrained(str(folder))
        _without_code(folder)
        for name, file in licences_of(self).items():
            if not (folder / name).exists():
                shutil.copyfile(file, folder / name)


def differs(problem: str, *, is_always_checked: bool = False) -> GymError:
    """Return the error for files that differ from their source; ``--skip-check`` does not skip all checks."""
    remedy = "report this with the model's name"
    if not is_always_checked:
        remedy += "; --skip-check writes it anyway"
    return GymError(ErrorCode.EXPORT_DIFFERS, f"{problem}; nothing was written", remedy)


def cast(model: Any, dtype: str) -> Any:
    """Convert the model's weights in place, except rotary frequencies, which are never saved."""
    import torch

    for value in model.state_dict(keep_vars=True).values():
        if value.is_floating_point():
            value.data = value.data.to(getattr(torch, dtype))
    return model


def _without_folders(name: str) -> str:
    """Return ``model_name`` without folders, also for ``BASE:VARIANT`` and for a path that does not exist."""
    base, colon, variant = name.rpartition(":")
    if colon and "/" not in variant and not Path(name).exists():
        return f"{_without_folders(base)}:{variant}"
    shown = model_name(name)
    return shown if is_hub_name(shown) else Path(shown).name


def _without_code(folder: Path) -> None:
    """Remove references to the source's Python files from the configs.

    The files are not copied, and programs that trust what they load (such as llama.cpp's converter) would run them."""
    for file in folder.glob("*config.json"):
        values = read_object(file)
        if not values.keys().isdisjoint(CODE_KEYS):
            without_code = {key: value for key, value in values.items() if key not in CODE_KEYS}
            file.write_text(json.dumps(without_code, indent=2) + "\n", encoding="utf-8")


def licences_of(source: Source) -> dict[str, Path]:
    """Return licences and notices of a model by name; of two with the same name, the nearer one.

    Raises:
        GymError: ``MODEL_INVALID`` for a file larger than ``_MAX_LICENCE_BYTES``, which cannot be a licence.
    """
    licences: dict[str, Path] = {}
    for pattern in TRAVELS:
        for place in source.folders:
            for file in sorted(place.glob(pattern)):
                if lies_in(file, place):
                    if file.stat().st_size > _MAX_LICENCE_BYTES:
                        raise GymError(
                            ErrorCode.MODEL_INVALID,
                            f"{file}: the licence file has {readable_bytes(file.stat().st_size)}",
                            "check its content: licences are copied with every export",
                        )
                    licences.setdefault(file.name, file)
    return licences


def open_source(
    name: str,
    adapters: Sequence[str] = (),
    *,
    base: str | None = None,
    variant: str | None = None,
    variants: Path | None = None,
) -> Source:
    """Open the model called ``name`` in float32, with ``adapters`` and its delta applied.

    Args:
        name: gym-nano, a model folder, the folder of a run or an adapter, or a name in the local cache;
            ``BASE:VARIANT`` or a ``.gymdelta`` as well.
        adapters: PEFT folders, applied in this order, below a delta.
        base: The base of a ``.gymdelta`` or an adapter; None for the one that it names.
        variant: A variant of the folder ``variants``, on ``name``.
        variants: See ``gym_fed.serving.store.naming.variants_folder``.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` or ``MODEL_INVALID``; ``CONFIG_INVALID`` for an adapter of another base;
            ``BASE_MISMATCH`` for a delta of another base; ``USAGE`` for either on quantised weights; as
            ``named_delta``.
    """
    from gym_fed.serving.store.naming import named_delta

    named = named_delta(name, base=base, variant=variant, store=variants)
    if named is not None:
        shown = name if variant is None else f"{name}:{variant}"
        return _with_delta(shown, named.base, adapters, named.delta)
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
        adapter_tokenizer(chain, tokenizer, model, load_tokenizer),
        home_name,
        chain[:-1],
        _folders(chain, home),
        stored,
        _changes_base(chain),
        lambda: _load(home_name)[0],
        owned=True,
    )


def _with_delta(name: str, named_base: str, adapters: Sequence[str], delta: Path) -> Source:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.vocabulary import apply_with_tokens

    base, chain = chain_on(named_base, adapters)
    home = Path(resolve(base))
    _require_unquantised(base, home, chain, "a delta")
    loaded, tokenizer = _load(base)
    with quiet_loading():
        model = merge_adapters(loaded, chain)
    below = LoadedModel(model, adapter_tokenizer(chain, tokenizer, model, load_tokenizer), base)
    whole = apply_with_tokens(below, delta, BaseSpec.of(model, model_name(base)))
    return Source(
        name,
        whole.model.eval(),
        whole.tokenizer,
        base,
        chain,
        _folders(chain, home),
        stored_dtype(home),
        _changes_base(chain),
        lambda: _load(base)[0],
        delta,
        owned=True,
    )


def _folders(chain: Sequence[Adapter], home: Path) -> list[Path]:
    return [*(adapter.folder for adapter in reversed(chain)), home]


def _changes_base(chain: Sequence[Adapter]) -> bool:
    return any((adapter.folder / BASE_CHANGES).is_file() for adapter in chain)


def stored_dtype(home: Path) -> str:
    """Return the dtype of a model folder's weights from its config, or else from its first tensor."""
    values = read_object(home / "config.json")
    dtype = values.get("dtype") or values.get("torch_dtype") or _dtype_of_weights(home)
    return dtype if dtype in DTYPES else "float32"


def _dtype_of_weights(home: Path) -> str | None:
    from safetensors import SafetensorError, safe_open

    for file in sorted(home.glob("*.safetensors")):
        with suppress(SafetensorError), safe_open(file, "np") as tensors:
            name = next(iter(tensors.keys()))
            return {"BF16": "bfloat16", "F16": "float16"}.get(tensors.get_slice(name).get_dtype())
    return None


def _load(name: str) -> tuple[Any, Any]:
    from gym_fed.base.modeling.processors import is_vision_model, load_vision_model

    if is_vision_model(name):
        return load_vision_model(name, dtype="float32", arguments={})
    loaded = load_model(name)
    return loaded.model, loaded.tokenizer


def _require_unquantised(base: str, home: Path, chain: Sequence[Adapter], delta: str = "") -> None:
    from gym_fed.base.modeling.weight_count import prequantised

    method = prequantised(str(home))
    if method is not None and (chain or delta):
        remedy = "its --base" if delta else f"gym export UNQUANTISED-BASE --adapter {chain[-1].name}"
        raise GymError(
            ErrorCode.USAGE,
            f"{base} is quantised by {method}, and {delta or 'an adapter'} cannot be merged into it exactly",
            f"load the base unquantised: {remedy}",
        )
