"""Read the safetensors files of a model folder without torch: tensor locations, bytes, digests and sizes."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gym_fed.core.json_files import canonical_json, read_object
from gym_fed.core.portable import O_BINARY, read_at

if TYPE_CHECKING:
    import torch

BLOCK_WEIGHTS = 1 << 20
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_SIZES = {"F32": 4, "BF16": 2, "F16": 2}


@dataclass(frozen=True)
class FileTensor:
    """The location of a tensor.

    Attributes:
        path: Path of the file.
        dtype: Dtype in safetensors notation: ``F32``, ``BF16`` or ``F16``.
        shape: Shape of the tensor.
        start: Offset of its first byte.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    def blocks(self) -> Iterator[tuple[int, bytearray]]:
        """Yield the bytes in blocks of ``BLOCK_WEIGHTS`` weights, with the index of each block's first weight."""
        size, total = _SIZES[self.dtype], math.prod(self.shape)
        handle = os.open(self.path, os.O_RDONLY | O_BINARY)
        try:
            for at in range(0, total, BLOCK_WEIGHTS):
                count = min(BLOCK_WEIGHTS, total - at)
                yield at, bytearray(read_at(handle, count * size, self.start + at * size))
        finally:
            os.close(handle)

    def float32_blocks(self) -> Iterator[np.ndarray[tuple[int], np.dtype[np.float32]]]:
        """Yield the weights as float32 in blocks."""
        for _, raw in self.blocks():
            if self.dtype == "BF16":  # bfloat16 is the upper half of a float32
                yield (np.frombuffer(raw, np.dtype("<u2")).astype(np.uint32) << 16).view(np.float32)
            else:
                kind = "<f4" if self.dtype == "F32" else "<f2"
                yield np.frombuffer(raw, np.dtype(kind)).astype(np.float32, copy=False)


def file_tensors(folder: Path) -> dict[str, FileTensor] | None:
    """Return a model folder's tensors; None if its weights have unsupported formats or dtypes, or are unreadable.

    Loading the model then reports the problem.
    """
    tensors = _all_tensors(folder)
    if tensors is None or any(tensor.dtype not in _SIZES for tensor in tensors.values()):
        return None
    return tensors


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of a model folder's tensors, of any dtype; None as in ``file_tensors``."""
    tensors = _all_tensors(folder)
    return None if tensors is None else {name: tensor.shape for name, tensor in tensors.items()}


def _all_tensors(folder: Path) -> dict[str, FileTensor] | None:
    from safetensors import SafetensorError

    try:
        files = [folder / _WEIGHTS]
        if not files[0].is_file():
            names = set(read_object(folder / _INDEX)["weight_map"].values())
            files = [folder / name for name in sorted(names)]
        tensors: dict[str, FileTensor] = {}
        for file in files:
            tensors |= _tensors_of(file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
        return None
    return tensors


def _tensors_of(path: Path) -> dict[str, FileTensor]:
    """Read a file's tensors after safetensors has checked its header."""
    from safetensors import safe_open

    with safe_open(path, "np"):
        pass
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start = 8 + length + entry["data_offsets"][0]
        tensors[name] = FileTensor(path, entry["dtype"], tuple(entry["shape"]), start)
    return tensors


def tensor_head(name: str, dtype: torch.dtype | str, shape: Sequence[int]) -> bytes:
    """Return the bytes that ``tensors_digest`` hashes before a tensor's data; ``dtype`` is torch's, or its name."""
    head = canonical_json([name, str(dtype).removeprefix("torch."), list(shape)])
    return len(head).to_bytes(8, "little") + head


def float32_digest(tensors: Mapping[str, FileTensor], names: Iterable[str]) -> str:
    """Compute ``tensors_digest`` of stored tensors in float32, in blocks; ``names`` must be sorted."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(tensor_head(name, "float32", tensors[name].shape))
        for block in tensors[name].float32_blocks():
            digest.update(block.data)
    return f"sha256:{digest.hexdigest()}"


def folder_digest(folder: Path) -> str | None:
    """Compute the digest of a model folder's tensors in float32, for any dtype and sharding.

    A head tied to the embeddings is excluded, since not every copy stores it.

    Returns:
        The digest; None if the weights have unsupported formats.
    """
    tensors = file_tensors(folder)
    if tensors is None:
        return None
    file = folder / "config.json"
    tied = file.is_file() and read_object(file).get("tie_word_embeddings", False)
    names = sorted(name for name in tensors if not (tied and name == "lm_head.weight"))
    return float32_digest(tensors, names)
