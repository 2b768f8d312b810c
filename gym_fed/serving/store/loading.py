"""Loading the deltas of a store for the layout of the served model, and their memory before they are loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.file import DeltaFile
    from gym_fed.serving.forward.target_modules import ModelLayout
    from gym_fed.serving.forward.variant_weights import LoadedVariant

Loader = Callable[[str, "DeltaFile", "ModelLayout | None", str], "LoadedVariant"]
"""Takes name, open delta, layout of the model and SHA-256, like ``load_variant``."""


def load_variant(name: str, delta: DeltaFile, layout: ModelLayout | None, sha256: str) -> LoadedVariant:
    """Load a variant; raises as ``variant_weights.load_variant_weights``, and ``USAGE`` without a layout."""
    from gym_fed.serving.forward.variant_weights import loaded_variant

    if layout is None:
        raise GymError(ErrorCode.USAGE, "the variant store was opened without a model's layout")
    return loaded_variant(name, delta, layout, sha256)


def least_bytes(path: Path, base: BaseSpec | None, layout: ModelLayout | None) -> int:
    """Return the memory of the parameters that a delta replaces, by its manifest; 0 if that cannot be read."""
    if layout is None or not layout.replaceable:
        return 0
    from gym_fed.delta.file import DeltaFile

    try:
        with DeltaFile.open(path, base) as delta:
            replaced = [layout.replaceable.get(record.name) for record in delta.manifest.tensors]
    except GymError:
        return 0  # the load reports it
    return sum(tensor.nbytes for tensor in replaced if tensor is not None)
