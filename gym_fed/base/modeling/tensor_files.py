"""The tensors of a model folder's safetensors files: where each lies, and its bytes in blocks; no torch is needed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gym_fed.core.json_files import read_object
from gym_fed.core.portable import O_BINARY, read_at

BLOCK_WEIGHTS = 1 << 20
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_SIZES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class FileTensor:
    """Where a tensor is.

    Attributes:
        path: The file.
        dtype: As safetensors calls it: ``F32``, ``BF16`` or ``F16``.
        shape: Of the tensor.
        start: Its first byte.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def blocks(self) -> Iterator[tuple[int, bytearray]]:
        """Its bytes in blocks of ``BLOCK_WEIGHTS`` weights, each with the place of its first weight."""
        size, total = _SIZES[self.dtype], math.prod(self.shape)
        handle = os.open(self.path, os.O_RDONLY | O_BINARY)
        try:
            for at in range(0, total, BLOCK_WEIGHTS):
                count = min(BLOCK_WEIGHTS, total - at)
                yield at, bytearray(read_at(handle, count * size, self.start + at * size))
        finally:
            os.close(handle)

    def float32_blocks(self) -> Iterator[np.ndarray[tuple[int], np.dtype[np.float32]]]:
        """Its weights in float32, in blocks."""
        for _, raw in self.blocks():
            if self.dtype == "BF16":  # the upper half of a float32
                yield (np.frombuffer(raw, np.dtype("<u2")).astype(np.uint32) << 16).view(np.float32)
            else:
                kind = "<f4" if self.dtype == "F32" else "<f2"
                yield np.frombuffer(raw, np.dtype(kind)).astype(np.float32, copy=False)


def file_tensors(folder: Path) -> dict[str, FileTensor] | None:
    """The tensors of a model folder by name; None where its weights are in other files or types, or cannot be read.

    Loading the model then reports what is wrong.
    """
    found = _all_tensors(folder)
    return None if found is None or any(one.dtype not in _SIZES for one in found.values()) else found


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """The shapes of a model folder's tensors, of whatever types; None as ``file_tensors``."""
    found = _all_tensors(folder)
    return None if found is None else {name: one.shape for name, one in found.items()}


def _all_tensors(folder: Path) -> dict[str, FileTensor] | None:
    from safetensors import SafetensorError

    try:
        files = [folder / _WEIGHTS]
        if not files[0].is_file():
            names = set(read_object(folder / _INDEX)["weight_map"].values())
            files = [folder / name for name in sorted(names)]
        found: dict[str, FileTensor] = {}
        for file in files:
            found |= _tensors_of(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None
    return found


def _tensors_of(path: Path) -> dict[str, FileTensor]:
    """The tensors of a file, whose header safetensors has checked."""
    from safetensors import safe_open

    with safe_open(path, "np"):
        pass
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        start = 8 + length + entry["data_offsets"][0]
        found[name] = FileTensor(path, entry["dtype"], tuple(entry["shape"]), start)
    return found
