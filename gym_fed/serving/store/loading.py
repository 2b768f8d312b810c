"""Load the deltas of a store for the layout of the served model, and estimate their memory before that."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.file import DeltaFile
    from gym_fed.serving.forward.target_modules import ModelLayout
    from gym_fed.serving.forward.variant_weights import LoadedVariant, VariantTokens

Loader = Callable[[str, "DeltaFile", "ModelLayout | None", str], "LoadedVariant"]
"""A function of the name, the open delta, the layout of the model and the SHA-256, like ``load_variant``."""


def load_variant(name: str, delta: DeltaFile, layout: ModelLayout | None, sha256: str) -> LoadedVariant:
    """Load a variant. Raises the errors of ``variant_weights.load_variant_weights``, and ``USAGE`` without a layout."""
    from gym_fed.serving.forward.variant_weights import loaded_variant

    if layout is None:
        raise GymError(ErrorCode.USAGE, "the variant store was opened without a model's layout")
    return loaded_variant(name, delta, layout, sha256)


def least_bytes(path: Path, base: BaseSpec | None, layout: ModelLayout | None) -> int:
    """Return the bytes of the parameters that a delta replaces, by its manifest; 0 if that cannot be read."""
    if layout is None or not layout.replaceable:
        return 0
    from gym_fed.delta.file import DeltaFile

    try:
        with DeltaFile.open(path, base, added_tokens=True) as delta:
            replaced = [layout.replaceable.get(record.name) for record in delta.manifest.tensors]
    except GymError:
        return 0  # loading it will report the error
    return sum(tensor.nbytes for tensor in replaced if tensor is not None)


_MAX_LISTS = 4096


class TokenLists:
    """The added tokens of the deltas of a store, by digest. Thread-safe.

    Args:
        path: Function that returns the path of a file.
        base: The served base.
    """

    def __init__(self, path: Callable[[str], Path], base: BaseSpec | None) -> None:
        self._path, self._base = path, base
        self._lists: OrderedDict[str, VariantTokens | None] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, sha256: str) -> VariantTokens | None:
        """Return the added tokens of a file; None if it has none or cannot be loaded."""
        with self._lock:
            if sha256 in self._lists:
                self._lists.move_to_end(sha256)
                return self._lists[sha256]
        tokens = self._read(sha256)
        with self._lock:
            self._lists[sha256] = tokens
            if len(self._lists) > _MAX_LISTS:
                self._lists.popitem(last=False)
        return tokens

    def _read(self, sha256: str) -> VariantTokens | None:
        from gym_fed.delta.file import DeltaFile
        from gym_fed.serving.forward.variant_weights import VariantTokens

        try:
            delta = DeltaFile.open(self._path(sha256), self._base, added_tokens=True)
        except GymError:
            return None  # loading it will report the error
        with delta:
            rows = delta.added_rows
            if rows is None and not delta.vocabulary:
                return None
            return VariantTokens(sha256, delta.vocabulary, None if rows is None else rows.size)
