"""Resolve names of models with a delta: ``BASE:VARIANT``, a variant of a store, or a ``.gymdelta`` file."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from gym_fed.base.models import NANO, folder_here, is_hub_name
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import default_home
from gym_fed.core.text import counted


def variants_folder(store: Path | None = None) -> Path:
    """Return the given folder, ``$GYM_VARIANTS``, or ``variants`` in ``$GYM_HOME`` (default ``~/.gym-fed``)."""
    return (store or Path(os.environ.get("GYM_VARIANTS") or default_home() / "variants")).expanduser()


def present_store() -> Path | None:
    """Return ``variants_folder()`` if variants have been added there, else None."""
    folder = variants_folder()
    return folder if (folder / "variants.db").is_file() else None


_SUFFIX = ".gymdelta"


@dataclass(frozen=True)
class NamedDelta:
    """A base and a delta on it.

    Attributes:
        base: A name or folder for ``load_model``.
        delta: The file.
    """

    base: str
    delta: Path


def in_parts(name: str) -> tuple[str, str] | None:
    """Split ``BASE:VARIANT`` into base and variant; None for any other name."""
    if ":" not in name or Path(name).exists():
        return None
    base, _, variant = name.rpartition(":")
    here = base == NANO or Path(base).expanduser().exists() or (is_hub_name(base) and "/" in base)
    return (base, variant) if base and variant and here else None


def delta_file(name: str | Path) -> Path | None:
    """Return the path of a ``.gymdelta``; None for any other name."""
    path = Path(name).expanduser()
    return path if path.suffix == _SUFFIX else None


def base_of_delta(delta: Path) -> str:
    """Return the base that a delta's manifest names.

    Raises:
        GymError: ``USAGE`` if it is not a model on this machine.
    """
    from gym_fed.delta.file import DeltaFile

    with DeltaFile.open(delta, added_tokens=True) as opened:
        name = str(opened.manifest.base_model)
    if not is_here(name):
        raise GymError(
            ErrorCode.USAGE, f"{delta}: its base {name!r} is not on this machine", "pass --base MODEL"
        )
    return name


def is_here(base_model: str) -> bool:
    """Return True if a manifest's base name is a model on this machine; a folder must be named by its path."""
    return (base_model == NANO or is_hub_name(base_model)) and folder_here(base_model) is not None


def base_needed(name: str, base: str | None) -> str | None:
    """Return the base of a name for ``named_delta``; None if only the delta's manifest names it."""
    if delta_file(name) is not None or (base is not None and is_adapter(name)):
        return base
    parts = in_parts(name)
    return name if parts is None else parts[0]


def is_adapter(name: str) -> bool:
    """Return True if a folder contains an adapter instead of a model."""
    return (Path(name).expanduser() / "adapter_config.json").is_file()


def named_delta(
    name: str, *, base: str | None = None, variant: str | None = None, store: Path | None = None
) -> NamedDelta | None:
    """Return the base and delta that the arguments name; None if ``name`` is a model without a delta.

    Args:
        name: A model, ``BASE:VARIANT``, or a ``.gymdelta``.
        base: The base of a ``.gymdelta`` (None: the one in its manifest), or of an adapter.
        variant: A variant of the store, with ``name`` as its base.
        store: The store's folder; see ``variants_folder``.

    Raises:
        GymError: ``USAGE`` for incompatible options; ``FILE_NOT_FOUND``, ``NOT_FOUND``; errors from
            ``base_of_delta``.
    """
    delta, parts = delta_file(name), in_parts(name)
    if base is not None and is_adapter(name):
        return None
    if base is not None and delta is None:
        raise GymError(ErrorCode.USAGE, f"--base applies only to a {_SUFFIX} file or an adapter", "omit it")
    if delta is not None:
        if variant is not None or store is not None:
            option = "--variant" if variant is not None else "--variants"
            raise GymError(ErrorCode.USAGE, f"{option} cannot be combined with a {_SUFFIX} file", "omit it")
        if not delta.is_file():
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"{delta}: no such file", f"use a {_SUFFIX} file")
        return NamedDelta(base or base_of_delta(delta), delta)
    if parts is not None and variant is not None:
        raise GymError(
            ErrorCode.USAGE,
            f"--variant cannot be combined with {name}, which already selects a variant",
            "pass only one of the two",
        )
    chosen = parts[1] if parts is not None else variant
    if chosen is None:
        if store is not None:
            raise GymError(
                ErrorCode.USAGE, "--variants: no variant was selected", "select one with --variant NAME"
            )
        return None
    from gym_fed.serving.store.store import VariantStore

    with VariantStore.open(variants_folder(store), create=False, require_signature=False) as opened:
        return NamedDelta(name if parts is None else parts[0], opened.path(chosen))


def base_of_store(folder: Path) -> str | None:
    """Return the one base of all variants of a store; None if there are no variants.

    Raises:
        GymError: ``USAGE`` for variants of several bases, or a base that is not on this machine under its name in the
            variants; errors from ``VariantStore.open``.
    """
    from gym_fed.serving.store.store import VariantStore

    names: dict[str, Counter[str]] = {}
    with VariantStore.open(folder, create=False, require_signature=False) as store:
        for record in store.list():
            names.setdefault(record.base_digest, Counter())[record.base_model] += 1
    if not names:
        return None
    if len(names) > 1:
        bases = ", ".join(
            f"{' or '.join(sorted(called))} ({digest[:19]}, {counted(called.total(), 'variant')})"
            for digest, called in sorted(names.items())
        )
        raise GymError(
            ErrorCode.USAGE,
            f"the variants in {folder} have {len(names)} bases: {bases}",
            "choose the one to serve: --base MODEL",
        )
    called = next(iter(names.values()))
    for name, _ in called.most_common():
        if is_here(name):
            return name
    raise GymError(
        ErrorCode.USAGE,
        f"the variants in {folder} are for base {' or '.join(sorted(called))}, "
        "which is not the name of a model on this machine",
        "pass its folder: --base FOLDER; or fetch it from the Hub: gym models pull NAME",
    )
