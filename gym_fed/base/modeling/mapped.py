"""Tensors that lie in a mapped file, and giving their pages back while the tensors are kept."""

from __future__ import annotations

import math
import mmap
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""By the address of the tensor; an entry is gone with the last reference to its tensor."""


def mapped_tensor(path: Path, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    """A tensor as a file has it from byte ``start`` on, in a private map of its own.

    Its pages are read when they are used, and are gone with the last reference to it, whatever becomes of others.
    """
    count = math.prod(shape) * dtype.itemsize
    if not count:  # no file can be mapped for no bytes
        return torch.empty(shape, dtype=dtype)
    before = start % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), before + count, access=mmap.ACCESS_COPY, offset=start - before)
    tensor = torch.from_numpy(np.frombuffer(view, np.uint8, count, before)).view(dtype).reshape(shape)
    _maps[tensor.data_ptr()] = view
    return tensor


def release_pages(tensor: Tensor) -> None:
    """Take a mapped tensor's pages out of the process's memory; they are read again when it is used.

    What was written to the tensor is lost with them. Other tensors, and systems without such advice, are left alone.
    """
    view = _maps.get(tensor.data_ptr())
    if view is not None and hasattr(mmap, "MADV_DONTNEED"):
        view.madvise(mmap.MADV_DONTNEED)
