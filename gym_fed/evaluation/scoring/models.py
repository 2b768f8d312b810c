"""Resolve and open the model of an evaluation: a folder, run, adapter, variant, `.gymdelta` or server.

``resolve_model`` checks and resolves the names once; all later steps use the ``ResolvedModel``. One
base is in memory with its variants, as in serving, and one pass evaluates all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.adapters import CONFIG, base_of, read_adapter
from gym_fed.base.models import LoadedModel, folder_here, load_adapted, model_name, pick_device
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.store.naming import base_of_delta, delta_file, in_parts, variants_folder
from gym_fed.version import __version__

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.evaluation.scoring.scorer import Scorer
    from gym_fed.serving.forward.multi_variant import MultiVariantModel
    from gym_fed.serving.forward.variant_weights import LoadedVariant
    from gym_fed.serving.store.store import VariantStore


BASE = "base"
ENGINE = f"gym-fed {__version__}, packed steps"
_DTYPES = ("float32", "bfloat16")
_NOT_COMPUTED = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"})
"""Config keys that do not affect the forward pass, and the dtype, which is a separate part of the identity."""


@dataclass(frozen=True)
class ModelRequest:
    """The model to evaluate.

    Attributes:
        model: A name or folder as for ``load_model``, ``BASE:VARIANT``, a ``.gymdelta``, or a loaded model.
        base: The base of a ``.gymdelta``; None for the one named in its manifest.
        adapters: Adapters to apply in order and merge.
        variants: Names of variants in the store. With ``store`` and no names: the base and all variants.
        store: Folder of variants; None for ``$GYM_VARIANTS``, or ``variants`` in ``$GYM_HOME``.
        api: Address of an OpenAI-compatible server, which excludes the other options except ``model``.
        device: The device, as for ``pick_device``.
        dtype: ``float32`` or ``bfloat16``.
    """

    model: Any
    base: str | None = None
    adapters: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    store: Path | None = None
    api: str | None = None
    api_key: str | None = None
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class OpenModels:
    """Open models, ready to be scored. Close it after use.

    Attributes:
        scorer: The scorer of all models.
        names: The models' names in results, by their name in ``scorer.models``.
        identities: The identity of each model's results, without the tasks.
    """

    scorer: Scorer
    names: Mapping[str, str]
    identities: Mapping[str, Mapping[str, str]]

    def close(self) -> None:
        """Free the models."""
        self.scorer.close()

    def __enter__(self) -> OpenModels:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class ResolvedModel:
    """A model to evaluate, whose names have been checked and resolved.

    Attributes:
        source: Name or folder of the model to load, or the loaded model.
        delta: The ``.gymdelta`` to add to it.
        variants: Names of the model's variants in the store.
    """

    request: ModelRequest
    source: Any
    delta: Path | None = None
    variants: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The model as the user named it."""
        return str(self.request.model)

    @property
    def downloads(self) -> list[str]:
        """The models that ``gym_fed.base.downloads`` could fetch if they are missing."""
        if self.request.api is not None or not isinstance(self.source, str | Path):
            return []
        return [str(self.source), *self.request.adapters]

    @cached_property
    def folder(self) -> Path | None:
        """The folder of ``source``; None if it is not on this machine. Read it after downloads."""
        return folder_here(str(self.source))

    @cached_property
    def run_config(self) -> dict[str, Any] | None:
        """The config of the finished run in ``folder``; None if it is not a run.

        Raises:
            GymError: ``STATE_CORRUPT`` for a ``config.yaml`` that cannot be read.
        """
        folder = self.folder
        if folder is None or not all((folder / name).is_file() for name in ("config.yaml", "result.json")):
            return None
        from gym_fed.config.yaml.strict import read_run_config

        return read_run_config(folder)


def resolve_model(request: ModelRequest) -> ResolvedModel:
    """Resolve the names of a request, before tasks are read and weights are loaded.

    Raises:
        GymError: ``USAGE`` for options that cannot be combined, and for a ``.gymdelta`` whose base is not on this
            machine; ``UNAVAILABLE`` for a format that cannot be evaluated; ``FILE_NOT_FOUND``; errors of
            ``VariantStore.get``.
    """
    if request.api is not None:
        local = {
            "--base": request.base,
            "--variant": request.variants,
            "--variants": request.store,
            "--dtype": request.dtype != _DTYPES[0],
            "--device": request.device != "cpu",
            "--adapter": request.adapters,
        }
        for option, value in local.items():
            if value:
                raise GymError(ErrorCode.USAGE, f"{option} cannot be combined with --api", "omit one of them")
        return ResolvedModel(request, request.model)
    if request.dtype not in _DTYPES:
        raise GymError(
            ErrorCode.USAGE, f"dtype {request.dtype!r} is not supported", f"use {' or '.join(_DTYPES)}"
        )
    source, variants = request.model, request.variants
    if isinstance(source, str) and (parts := in_parts(source)) is not None:
        if variants:
            raise GymError(
                ErrorCode.USAGE,
                f"--variant cannot be combined with {source}, which already selects a variant",
                "pass all variants with --variant",
            )
        source, variants = parts[0], (parts[1],)
    _require_variants(request.store, variants)
    if not isinstance(source, str | Path):
        return ResolvedModel(request, source, variants=variants)
    path = Path(source).expanduser()
    if path.suffix == ".onnx" or (
        path.is_dir() and not (path / "config.json").is_file() and any(path.glob("*.onnx"))
    ):
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"{path}: ONNX models cannot be evaluated",
            "evaluate the model that it was exported from",
        )
    delta = delta_file(source)
    if delta is None:
        if request.base is not None:
            raise GymError(ErrorCode.USAGE, "--base applies only to a .gymdelta file", "omit it")
        return ResolvedModel(request, source, variants=variants)
    if not delta.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"{delta}: no such file", "pass a .gymdelta file")
    return ResolvedModel(request, request.base or base_of_delta(delta), delta, variants)


def _require_variants(store_folder: Path | None, names: Sequence[str]) -> None:
    """Refuse a store or variants that do not exist."""
    if not names and store_folder is None:
        return
    with _open_store(store_folder) as store:
        for name in names:
            if name != BASE:
                store.get(name)


def _open_store(folder: Path | None, **options: Any) -> VariantStore:
    """Open an existing store, whose variants need no signature to be evaluated."""
    from gym_fed.serving.store.store import VariantStore

    return VariantStore.open(variants_folder(folder), create=False, require_signature=False, **options)


def open_models(model: ResolvedModel) -> OpenModels:
    """Load the base once, with each variant.

    Raises:
        GymError: Errors of ``load_model``, ``MultiVariantModel``, ``VariantStore`` and ``DeltaFile.open``.
    """
    request = model.request
    if request.api is not None:
        from gym_fed.evaluation.scoring.api import ApiScorer

        scorer = ApiScorer(request.api, model.name, api_key=request.api_key)
        identity = {
            "model": f"{request.api} {scorer.model}",
            "delta": "none",
            "dtype": "unknown",
            "engine": "api",
        }
        return OpenModels(scorer, {scorer.model: scorer.model}, {scorer.model: identity})
    return _open_local(model)


def dense_model(model: ResolvedModel, key: str | None = None) -> LoadedModel:
    """Load one of the models of ``open_models`` as a plain causal LM with its delta added, as needed for training.

    Args:
        model: A model on this machine.
        key: A name in ``scorer.models``; None for the first variant, or the base if there are none.

    Raises:
        GymError: See ``open_models``.
    """
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.vocabulary import apply_with_tokens

    loaded, name = _load_source(model)
    loaded.model.float().to(pick_device(model.request.device))
    delta = model.delta
    key = key or next(iter(model.variants), BASE)
    if delta is None and key != BASE:
        with _open_store(model.request.store) as store:
            delta = store.path(key)
    if delta is not None:
        return apply_with_tokens(loaded, delta, BaseSpec.of(loaded.model, model_name(name)))
    return loaded


def _open_local(resolved: ResolvedModel) -> OpenModels:
    import torch

    from gym_fed.core.files import file_sha256
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.vocabulary import adds_tokens, apply_with_tokens
    from gym_fed.evaluation.scoring.local import LocalScorer
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

    request = resolved.request
    loaded, name = _load_source(resolved)
    base = BaseSpec.of(loaded.model.float(), model_name(name))
    merged = resolved.delta if resolved.delta is not None and adds_tokens(resolved.delta) else None
    if merged is not None:
        loaded = apply_with_tokens(loaded, merged, base)
    model = loaded.model.to(device=pick_device(request.device), dtype=getattr(torch, request.dtype))
    model = model.requires_grad_(False).eval()
    with ExitStack() as stack:
        served = stack.enter_context(MultiVariantModel(model))
        own: dict[str, LoadedVariant | None] = {} if merged is None else {merged.stem: None}
        variants = own or _load_variants(resolved, base, served, stack)
        scorer = LocalScorer(served, loaded.tokenizer, variants, on_close=stack.pop_all().close)
    names = {key: name if key == BASE else f"{name}:{key}" for key in variants}
    if resolved.delta is not None:
        names = {key: resolved.name for key in variants}
    settings = settings_digest(model, loaded.tokenizer)
    identities = {
        key: {
            "model": base.digest,
            "delta": (file_sha256(merged) if merged else "none") if variant is None else variant.delta_sha256,
            "settings": settings,
            "dtype": request.dtype,
            "engine": ENGINE,
            **scorer.identity,
        }
        for key, variant in variants.items()
    }
    return OpenModels(scorer, names, identities)


def _load_source(model: ResolvedModel) -> tuple[LoadedModel, str]:
    """Load the source with its adapters merged; return it and its name in results."""
    from gym_fed.base.modeling.adapters import merged

    source, adapters = model.source, model.request.adapters
    if isinstance(source, str | Path):
        loaded = load_adapted(str(source), adapters, images=True)
        name = "+".join((str(source), *adapters))
    else:
        name = getattr(source, "name", None) or "model"
        loaded = LoadedModel(source.model, source.tokenizer, name)
    return LoadedModel(merged(loaded.model, name), loaded.tokenizer, name), name


def _load_variants(
    model: ResolvedModel, base: BaseSpec, served: MultiVariantModel, stack: ExitStack
) -> dict[str, LoadedVariant | None]:
    """Load the models to score, by name; the value None is the base."""
    from gym_fed.core.files import file_sha256
    from gym_fed.delta.file import DeltaFile
    from gym_fed.serving.forward.variant_weights import loaded_variant

    if (delta := model.delta) is not None:
        with DeltaFile.open(delta, base) as opened:
            return {delta.stem: loaded_variant(delta.stem, opened, served.layout, file_sha256(delta))}
    if not model.variants and model.request.store is None:
        return {BASE: None}
    store = stack.enter_context(
        _open_store(model.request.store, base=base, layout=served.layout, cache_bytes=1 << 62)
    )
    names = list(model.variants) or [BASE, *store.names()]
    return {name: None if name == BASE else store.acquire(name) for name in dict.fromkeys(names)}


def settings_digest(model: Any, tokenizer: Any) -> str:
    """Return the digest of the config and the tokenizer in memory, on which outcomes depend besides the tensors.

    Folder names, versions, the file's dtype and the tokenizer's padding are excluded: they do not change tokens.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_COMPUTED}
    own = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if own is None else json.loads(own.to_str())
    rules = {
        key: value for key, value in rules.items() if own is None or key not in ("padding", "truncation")
    }
    special = {key: str(value) for key, value in tokenizer.special_tokens_map.items()}
    text = json.dumps([config, rules, special], sort_keys=True, default=str)
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def template_digest(tokenizer: Any, applied: bool) -> str:
    """Return the digest of the chat template, if it is used."""
    if not applied:
        return "none"
    return f"sha256:{hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()}"


def named_variants(texts: Sequence[str]) -> tuple[str, ...]:
    """Split the names of an option that may be repeated and contain commas."""
    return tuple(dict.fromkeys(name.strip() for text in texts for name in text.split(",") if name.strip()))


def origin_of(model: ResolvedModel) -> ResolvedModel | None:
    """Return the model that a fine-tune was made from; None if its origin is unknown.

    Args:
        model: A model of this machine, with one variant at most.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` if the base is known but not on this machine; errors of ``read_adapter`` and
            ``read_config``.
    """
    request = model.request
    if model.delta is not None or model.variants:
        return resolve_model(replace(request, model=model.source, base=None, variants=(), store=None))
    if request.adapters:
        return resolve_model(replace(request, adapters=()))
    if model.folder is None:
        return None
    below: Any
    if (model.folder / CONFIG).is_file():
        adapter = read_adapter(model.name, model.folder)
        base, adapters = base_of(adapter), tuple(map(str, adapter.below))
    else:
        config = model.run_config
        if config is None or not config.get("model") or config.get("model_init"):
            return None
        below = config.get("adapter") or []
        base, adapters = str(config["model"]), (below,) if isinstance(below, str) else tuple(below)
    for name in (base, *adapters):
        if folder_here(name) is None:
            raise GymError(
                ErrorCode.MODEL_NOT_FOUND,
                f"{Path(model.name).name} was made from {name}, which is not on this machine",
                f"fetch it with: gym models pull {name}; or choose another model with --compare",
            )
    return resolve_model(replace(request, model=base, adapters=adapters))
