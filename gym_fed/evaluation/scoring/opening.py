"""Open a model for evaluation: a folder, run, adapter, variant, `.gymdelta` or server.

One base is in memory with its variants, as in serving, and a pass evaluates all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.base.modeling.adapters import CONFIG, base_of, read_adapter
from gym_fed.base.models import LoadedModel, folder_here, load_adapted, model_name, pick_device
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.own_set import run_config
from gym_fed.serving.store.naming import base_of_delta, delta_file, in_parts, variants_folder
from gym_fed.version import __version__

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.evaluation.scoring.scorer import Scorer
    from gym_fed.serving.forward.multi_variant import MultiVariantModel
    from gym_fed.serving.forward.variant_weights import LoadedVariant

BASE = "base"
ENGINE = f"gym-fed {__version__}, packed steps"
_DTYPES = ("float32", "bfloat16")
_NOT_COMPUTED = frozenset({"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"})
"""Config keys that no forward pass reads, and the dtype, which is a separate part of the identity."""
_EXPORTED = {
    ".onnx": "evaluate the model that it was exported from",
}


@dataclass(frozen=True)
class ModelRequest:
    """The model to evaluate.

    Attributes:
        model: A name or folder as for ``load_model``, ``BASE:VARIANT``, a ``.gymdelta``; or a loaded model.
        base: The base of a ``.gymdelta``; None: the name in its manifest.
        adapters: Put on in order, and merged.
        variants: Names of variants in the store. With ``store`` and no names: the base and all variants.
        store: Folder of variants; None: ``$GYM_VARIANTS``, or ``variants`` of ``$GYM_HOME``.
        api: Address of a server with OpenAI's API, in the place of all of these but ``model``.
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
        scorer: Over all of them.
        names: The names in results, by name in ``scorer.models``.
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


def models_needed(request: ModelRequest) -> list[str]:
    """Return the models of a request that ``gym_fed.base.downloads`` could fetch if they are missing."""
    if request.api is not None or not isinstance(request.model, str | Path):
        return []
    request = _in_parts(request)
    name = request.base if str(request.model).endswith(".gymdelta") else str(request.model)
    return [model for model in (name, *request.adapters) if model is not None]


def require_named(request: ModelRequest) -> None:
    """Refuse what cannot be opened, before tasks are read and weights are loaded.

    Raises:
        GymError: ``USAGE`` for options that do not go together; ``UNAVAILABLE`` for a format that is not evaluated;
            ``FILE_NOT_FOUND`` and ``MODEL_NOT_FOUND``.
    """
    local = {
        "--base": request.base,
        "--variant": request.variants,
        "--variants": request.store,
        "--dtype": request.dtype != _DTYPES[0],
        "--device": request.device != "cpu",
    }
    if request.api is not None:
        for option, value in {**local, "--adapter": request.adapters}.items():
            if value:
                raise GymError(ErrorCode.USAGE, f"{option} does not go with --api", "leave one of them out")
        return
    if request.dtype not in _DTYPES:
        raise GymError(
            ErrorCode.USAGE, f"dtype {request.dtype!r} is not evaluated", f"use {' or '.join(_DTYPES)}"
        )
    _require_variants(request)
    if not isinstance(request.model, str | Path):
        return
    path = Path(str(request.model)).expanduser()
    if (remedy := _EXPORTED.get(path.suffix)) is not None:
        raise GymError(ErrorCode.UNAVAILABLE, f"{path}: {path.suffix} files are not evaluated", remedy)
    if path.suffix == ".gymdelta" and not path.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"{path}: no such file", "name a .gymdelta file")
    if request.base is not None and path.suffix != ".gymdelta":
        raise GymError(ErrorCode.USAGE, "--base goes with a .gymdelta file", "leave it out")
    if path.is_dir() and not (path / "config.json").is_file() and any(path.glob("*.onnx")):
        raise GymError(ErrorCode.UNAVAILABLE, f"{path}: ONNX is not evaluated", _EXPORTED[".onnx"])


def _require_variants(request: ModelRequest) -> None:
    """Refuse a store or variants that do not exist."""
    names = _in_parts(request).variants
    if not names and request.store is None:
        return
    from gym_fed.serving.store.store import VariantStore

    with VariantStore.open(variants_folder(request.store), create=False, require_signature=False) as store:
        for name in names:
            if name != BASE:
                store.get(name)


def open_models(request: ModelRequest) -> OpenModels:
    """Load the base once, with each variant.

    Raises:
        GymError: As ``require_named``, ``load_model``, ``MultiVariantModel``, ``VariantStore`` and ``DeltaFile.open``.
    """
    require_named(request)
    if request.api is not None:
        from gym_fed.evaluation.scoring.api import ApiScorer

        scorer = ApiScorer(request.api, str(request.model), api_key=request.api_key)
        identity = {
            "model": f"{request.api} {scorer.model}",
            "delta": "none",
            "dtype": "unknown",
            "engine": "api",
        }
        return OpenModels(scorer, {scorer.model: scorer.model}, {scorer.model: identity})
    request = _in_parts(request)
    delta = _delta_file(request.model)
    source = request.model if delta is None else (request.base or base_of_delta(delta))
    loaded, name = _loaded(source, request)
    return _open_local(loaded, name, request, delta)


def dense_model(request: ModelRequest, key: str) -> LoadedModel:
    """Load one of the models of ``open_models`` as a plain causal LM with its delta added, as needed for training.

    Args:
        request: A request for models on this machine.
        key: A name in ``scorer.models``.

    Raises:
        GymError: As ``open_models``.
    """
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.file import DeltaFile, apply_delta
    from gym_fed.serving.store.store import VariantStore

    require_named(request)
    request = _in_parts(request)
    delta = _delta_file(request.model)
    loaded, name = _loaded(
        request.model if delta is None else (request.base or base_of_delta(delta)), request
    )
    loaded.model.float().to(pick_device(request.device))
    if delta is None and key != BASE:
        with VariantStore.open(
            variants_folder(request.store), create=False, require_signature=False
        ) as store:
            delta = store.path(key)
    if delta is not None:
        with DeltaFile.open(delta, BaseSpec.of(loaded.model, model_name(name))) as opened:
            apply_delta(loaded.model, opened)
    return loaded


def _open_local(loaded: LoadedModel, name: str, request: ModelRequest, delta: Path | None) -> OpenModels:
    import torch

    from gym_fed.delta.base import BaseSpec
    from gym_fed.evaluation.scoring.local import LocalScorer
    from gym_fed.serving.forward.multi_variant import MultiVariantModel

    base = BaseSpec.of(loaded.model.float(), model_name(name))
    model = loaded.model.to(device=pick_device(request.device), dtype=getattr(torch, request.dtype))
    model = model.requires_grad_(False).eval()
    with ExitStack() as stack:
        served = stack.enter_context(MultiVariantModel(model))
        variants = _variants(request, delta, base, served, stack)
        scorer = LocalScorer(served, loaded.tokenizer, variants, on_close=stack.pop_all().close)
    names = {key: name if key == BASE else f"{name}:{key}" for key in variants}
    if delta is not None:
        names = {key: str(request.model) for key in variants}
    settings = settings_digest(model, loaded.tokenizer)
    identities = {
        key: {
            "model": base.digest,
            "delta": "none" if variant is None else variant.delta_sha256,
            "settings": settings,
            "dtype": request.dtype,
            "engine": ENGINE,
        }
        for key, variant in variants.items()
    }
    return OpenModels(scorer, names, identities)


def _loaded(source: Any, request: ModelRequest) -> tuple[LoadedModel, str]:
    from gym_fed.base.modeling.adapters import merged

    if isinstance(source, str | Path):
        loaded = load_adapted(str(source), request.adapters)
        name = str(source) if not request.adapters else "+".join((str(source), *request.adapters))
    else:
        name = getattr(source, "name", None) or "model"
        loaded = LoadedModel(source.model, source.tokenizer, name)
    return LoadedModel(merged(loaded.model, name), loaded.tokenizer, name), name


def _variants(
    request: ModelRequest,
    delta: Path | None,
    base: BaseSpec,
    served: MultiVariantModel,
    stack: ExitStack,
) -> dict[str, LoadedVariant | None]:
    """Return the models to score, by name."""
    from gym_fed.core.files import file_sha256
    from gym_fed.delta.file import DeltaFile
    from gym_fed.serving.forward.variant_weights import loaded_variant
    from gym_fed.serving.store.store import VariantStore

    if delta is not None:
        with DeltaFile.open(delta, base) as opened:
            return {delta.stem: loaded_variant(delta.stem, opened, served.layout, file_sha256(delta))}
    if not request.variants and request.store is None:
        return {BASE: None}
    store = stack.enter_context(
        VariantStore.open(
            variants_folder(request.store),
            base=base,
            layout=served.layout,
            require_signature=False,
            create=False,
            cache_bytes=1 << 62,
        )
    )
    names = list(request.variants) or [BASE, *store.names()]
    return {name: None if name == BASE else store.acquire(name) for name in dict.fromkeys(names)}


def _in_parts(request: ModelRequest) -> ModelRequest:
    """Split ``BASE:VARIANT``."""
    parts = in_parts(request.model) if isinstance(request.model, str) else None
    if parts is None:
        return request
    if request.variants:
        raise GymError(
            ErrorCode.USAGE,
            f"{request.model} names a variant, and --variant others",
            "name all with --variant",
        )
    return replace(request, model=parts[0], variants=(parts[1],))


def _delta_file(model: Any) -> Path | None:
    return delta_file(model) if isinstance(model, str | Path) else None


def settings_digest(model: Any, tokenizer: Any) -> str:
    """Return the digest of the config and tokenizer in memory, which outcomes depend on in addition to the tensors.

    Folder names, versions, the file's dtype and the tokenizer's padding are excluded, since they do not change
    tokens.
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


def base_request(request: ModelRequest) -> ModelRequest | None:
    """Return the request of a model's base; None if its origin is unknown.

    Args:
        request: A model of this machine, with one variant at most.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` when the base is known and not on this machine; ``USAGE`` for a ``.gymdelta`` that
            names no base of this machine; as ``read_adapter`` and ``read_config``.
    """
    name = str(request.model)
    if (delta := delta_file(name)) is not None:
        return replace(request, model=request.base or base_of_delta(delta), base=None)
    if (parts := in_parts(name)) is not None:
        return replace(request, model=parts[0])
    if request.variants:
        return replace(request, variants=(), store=None)
    if request.adapters:
        return replace(request, adapters=())
    folder = folder_here(name)
    if folder is None:
        return None
    if (folder / CONFIG).is_file():
        adapter = read_adapter(name, folder)
        return _on(request, base_of(adapter), adapter.below)
    config = run_config(folder)
    if config is None or not config.get("model") or config.get("model_init"):
        return None
    return _on(request, str(config["model"]), _listed(config.get("adapter")))


def _on(request: ModelRequest, base: str, adapters: Sequence[Any]) -> ModelRequest:
    for name in (base, *map(str, adapters)):
        if folder_here(name) is None:
            raise GymError(
                ErrorCode.MODEL_NOT_FOUND,
                f"{Path(str(request.model)).name} was made from {name}, which is not on this machine",
                f"fetch it with: gym models pull {name}; or name another model with --compare",
            )
    return replace(request, model=base, adapters=tuple(map(str, adapters)))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
