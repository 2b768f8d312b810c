"""The contents of a pushed version: the published files of a model, and the base that they need.

A folder contributes weights in safetensors, settings, tokenizer, chat template and licence; never logs, checkpoints,
pickles, code, or the run's own records, which contain paths. Omitted files are listed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_fed.base.downloads.selection import ADAPTER, INDEX, WHOLE
from gym_fed.base.downloads.selection import is_model_setting as is_setting
from gym_fed.base.files import TRAVELS, licence_of
from gym_fed.base.modeling.adapter_base import BASE_RECORD
from gym_fed.base.modeling.adapters import BASE_ADAPTERS, read_adapter
from gym_fed.base.modeling.adapters import CONFIG as ADAPTER_CONFIG
from gym_fed.base.modeling.rope import BASE_CHANGES
from gym_fed.base.modeling.vocabulary import set_special_ids
from gym_fed.base.models import (
    LoadedModel,
    folder_here,
    is_hub_name,
    load_model,
    model_name,
    quiet_loading,
    resolve,
)
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256, lies_in
from gym_fed.core.json_files import read_object
from gym_fed.delta.base import BaseSpec, model_tensors, tensors_digest
from gym_fed.delta.file import DeltaFile, apply_delta
from gym_fed.delta.kept import share_applied
from gym_fed.delta.vocabulary import tuned_tokenizer
from gym_fed.registry.card.facts import NO_DELTA
from gym_fed.registry.manifest import DELTA_FILE, NOT_STATED, BaseUsed, Kind


@dataclass
class Contents:
    """The contents of a version.

    Attributes:
        kind: ``weights``, ``adapter`` or ``delta``.
        files: Local files by their path in the model.
        base: The base of an adapter or a delta.
        digest: See ``ModelManifest.digest``.
        folder: The folder with records of the run, if any.
        left_out: Names of files in the folder that are not published.
    """

    kind: Kind
    files: dict[str, Path]
    base: BaseUsed | None
    digest: str | None
    folder: Path | None
    left_out: list[str] = field(default_factory=list)

    @property
    def identities(self) -> list[tuple[str, str]]:
        """Return digests of model and delta that records of its evaluations may name; empty if they cannot be known."""
        digests = [] if self.digest is None else [(self.digest, NO_DELTA)]
        if self.kind == "delta" and self.base is not None and self.base.digest is not None:
            digests.append((self.base.digest, file_sha256(self.files[DELTA_FILE])))
        return digests


def contents_of(path: Path, scratch: Path, base: str | None = None) -> Contents:
    """Collect the contents of a version.

    Args:
        path: The folder of a model, of a run or of an adapter, or a ``.gymdelta``.
        scratch: An empty folder for files that are changed before they are pushed.
        base: The base of an adapter or a delta, if it cannot be found by the name in it.

    Raises:
        GymError: ``USAGE`` if it is not a model; ``MODEL_INVALID``, ``DELTA_INVALID``, ``BASE_MISMATCH``
            or ``MODEL_NOT_FOUND`` for one that cannot be used.
    """
    if path.is_file() and path.suffix == ".gymdelta":
        return _delta(path, base)
    if (path / ADAPTER_CONFIG).is_file():
        return _adapter(path, scratch, base)
    if (path / "config.json").is_file():
        return _weights(path)
    raise GymError(
        ErrorCode.USAGE,
        f"{path}: no config.json or adapter_config.json, and no .gymdelta",
        "use the folder of a model, a run or an adapter, or a .gymdelta",
    )


def _weights(folder: Path) -> Contents:
    names = [WHOLE]
    if not (folder / WHOLE).is_file() and (folder / INDEX).is_file():
        weight_map = read_object(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise GymError(
                ErrorCode.MODEL_INVALID, f"{folder / INDEX} has no weight_map", "save the model again"
            )
        names = [INDEX, *sorted({str(name) for name in weight_map.values()})]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{folder} has no {missing[0]}",
            "only safetensors weights are pushed: gym export MODEL -o FOLDER writes them",
        )
    files, left_out = _files(folder, names)
    return Contents("weights", files, None, _digest(folder), folder, left_out)


def _adapter(folder: Path, scratch: Path, base: str | None) -> Contents:
    adapter = read_adapter(str(folder), folder)
    named = base or adapter.base
    if named is None:
        raise GymError(ErrorCode.MODEL_INVALID, f"{folder}: no base is given", "pass --base")
    files, left_out = _files(folder, [ADAPTER])
    for below in adapter.below:
        for file in (ADAPTER_CONFIG, ADAPTER, BASE_CHANGES, BASE_RECORD):
            if (below / file).is_file():
                files[f"{BASE_ADAPTERS}/{below.name}/{file}"] = below / file
    for path in (
        ADAPTER_CONFIG,
        *(p for p in files if p.startswith(BASE_ADAPTERS) and p.endswith(ADAPTER_CONFIG)),
    ):
        own = base if path == ADAPTER_CONFIG else None
        files[path] = _config_without_path(files[path], scratch / path, own)
    return Contents("adapter", files, _described_base(named), None, folder, left_out)


def _delta(file: Path, base: str | None) -> Contents:
    with DeltaFile.open(file, added_tokens=True) as delta:
        named, digest = base or delta.manifest.base_model, delta.manifest.base_digest
        loaded = base_model(named, digest)
        total = added(loaded, delta) if _product_free(delta) else None
    licence = licence_of(Path(resolve(named))) or NOT_STATED
    base_used = BaseUsed(name=model_name(named), digest=digest, licence=licence)
    return Contents("delta", {DELTA_FILE: file}, base_used, total, None)


def base_model(named: str, digest: str) -> LoadedModel:
    """Load the base called ``named``, and check its digest.

    Raises:
        GymError: ``BASE_MISMATCH``, or as ``load_model``.
    """
    loaded = load_model(named)
    actual = tensors_digest(loaded.model)
    if actual != digest:
        raise GymError(
            ErrorCode.BASE_MISMATCH,
            f"{named} has the digest {actual}, but {digest} is required",
            "pass the folder of the right base with --base",
        )
    return loaded


def _described_base(named: str) -> BaseUsed:
    """Describe a base by name, with digest and licence if it is on this machine."""
    here = folder_here(named)
    if here is None:
        return BaseUsed(name=model_name(named) if is_hub_name(named) else Path(named).name)
    digest = tensors_digest(load_model(named).model)
    return BaseUsed(name=model_name(named), digest=digest, licence=licence_of(here) or NOT_STATED)


def _digest(folder: Path) -> str | None:
    """Return the digest of a language model; None for reward models, vision models, and quantised ones."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TEXT_CLASSES

    config = read_object(folder / "config.json")
    classes = config.get("architectures") or []
    of_text = isinstance(classes, list) and any(name in TEXT_CLASSES.values() for name in classes)
    if not of_text or "quantization_config" in config or "vision_config" in config:
        return None
    return tensors_digest(load_model(str(folder)).model)


def _files(folder: Path, weights: list[str]) -> tuple[dict[str, Path], list[str]]:
    """Return the files of a folder to publish, and the names of the others."""
    files: dict[str, Path] = {}
    left_out = []
    for file in _walk(folder):
        path = file.relative_to(folder).as_posix()
        if path.startswith(f"{BASE_ADAPTERS}/"):
            continue
        if path not in weights and not is_setting(path) and path not in (BASE_CHANGES, BASE_RECORD):
            left_out.append(path)
            continue
        if "/" not in path and not lies_in(file, folder):
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"{folder} has {path} as a link to {file.resolve()}: only files inside the folder are pushed",
                "copy the file into the folder",
            )
        files[path] = file
    return files, left_out


def _walk(folder: Path) -> Iterator[Path]:
    """Yield visible files at the top and those of chat templates; other folders are skipped."""
    for file in sorted(folder.iterdir()):
        if file.name.startswith("."):
            continue
        if file.is_file():
            yield file
        elif file.name == "additional_chat_templates" and file.is_dir() and not file.is_symlink():
            yield from sorted(path for path in file.iterdir() if path.is_file() and not path.is_symlink())


def _config_without_path(file: Path, copy: Path, base: str | None) -> Path:
    """Copy an ``adapter_config.json``, with its base named by a name on the Hub, or by a folder's own name."""
    values: dict[str, Any] = read_object(file)
    named = values.get("base_model_name_or_path")
    given = base if base is not None and is_hub_name(base) else None
    is_path = isinstance(named, str) and (named.startswith((".", "/", "~")) or Path(named).is_dir())
    if given is None and not is_path:
        return file
    copy.parent.mkdir(parents=True, exist_ok=True)
    values["base_model_name_or_path"] = given or Path(str(named)).expanduser().resolve().name
    copy.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return copy


def saved(name: str, model: Any, tokenizer: Any, folder: Path) -> Path:
    """Save a model in memory to ``folder``.

    Raises:
        GymError: ``USAGE`` for an object without ``save_pretrained``.
    """
    tokenizer = tokenizer or getattr(model, "tokenizer", None)
    weights = model if hasattr(model, "save_pretrained") else getattr(model, "model", None)
    if not hasattr(weights, "save_pretrained"):
        raise GymError(
            ErrorCode.USAGE,
            f"{name}: {type(model).__name__} is not a model",
            "pass a folder, the result of Trainer.train, or a model with save_pretrained",
        )
    with quiet_loading():
        for part in (weights, *([tokenizer] if tokenizer is not None else [])):
            part.save_pretrained(str(folder))
    return folder


def _product_free(delta: DeltaFile) -> bool:
    """Return True if decoding multiplies no factors, so that every machine computes the same bits."""
    from gym_quant import get_codec

    return all(get_codec(record.codec).rank(record.params) is None for record in delta.manifest.tensors)


def added(base: LoadedModel, delta: DeltaFile) -> str:
    """Add a delta to its base in memory, and return the digest of the sum."""
    apply_delta(base.model, delta)
    return tensors_digest(base.model)


def rebuild(base: LoadedModel, file: Path, digest: str | None, folder: Path) -> float | None:
    """Rebuild the model of ``base`` and the delta ``file``, check its digest, and write it to ``folder``.

    Args:
        base: The loaded base, its digest checked; modified in place.
        file: A ``.gymdelta``.
        digest: The digest of the sum; None if it differs between machines.
        folder: An existing folder.

    Returns:
        The share of the delta that is in the written weights; None if it changes nothing.

    Raises:
        GymError: ``DELTA_INVALID``, ``BASE_MISMATCH``; ``HASH_MISMATCH`` if the sum is not the signed one.
    """
    spec = BaseSpec.of(base.model, model_name(base.name))
    with DeltaFile.open(file, spec, added_tokens=True) as delta:
        tokenizer = tuned_tokenizer(base.tokenizer, delta)
        kept = share_applied(model_tensors(base.model), delta)
        actual = added(base, delta)
        set_special_ids(base.model, tokenizer, delta.vocabulary.roles)
    if digest is not None and actual != digest:
        raise GymError(
            ErrorCode.HASH_MISMATCH,
            f"{file.name}: base and delta make a model of digest {actual}, but {digest} was signed",
            "the version is wrong: ask its author for a new one",
        )
    with quiet_loading():
        base.model.save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))
    home = Path(resolve(base.name))
    for pattern in TRAVELS:
        for text in sorted(home.glob(pattern)):
            if lies_in(text, home):
                shutil.copyfile(text, folder / text.name)
    return kept
