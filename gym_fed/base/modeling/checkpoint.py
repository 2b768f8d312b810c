"""Read the weights of a model folder from its safetensors files, in blocks or memory-mapped.

The digest of a base is computed from its float32 weights, which are never in memory as a whole: serving a model in
bfloat16 takes the memory of its bfloat16 weights and one block.
"""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gym_fed.base.modeling.tensor_files import FileTensor, file_tensors

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Checkpoint:
    """The tensors of one or several safetensors files, in float32, bfloat16 or float16.

    Attributes:
        entries: Location of each tensor by name.
    """

    def __init__(self, entries: dict[str, FileTensor]) -> None:
        """Use ``find`` instead."""
        self.entries = entries

    @classmethod
    def find(cls, folder: Path) -> Checkpoint | None:
        """Open a model folder; None if ``file_tensors`` returns None."""
        tensors = file_tensors(folder)
        return None if tensors is None else cls(tensors)

    def is_in(self, dtype: torch.dtype) -> bool:
        """Return True if every tensor has this dtype, so that a model can use the mapped file."""
        return all(_DTYPES[entry.dtype] == dtype for entry in self.entries.values())

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Load every tensor in a dtype, for the ``state_dict`` argument of ``from_pretrained``."""
        loaded = {}
        for name, entry in self.entries.items():
            tensor = _separate_tensor(entry.shape, dtype)
            for at, block in _blocks(entry):
                tensor.view(-1)[at : at + len(block)].copy_(block)
            loaded[name] = tensor
        return loaded

    def mapped(self) -> dict[str, Tensor]:
        """Map every tensor as stored, each in its own mapping (``mapped_tensor``)."""
        return {
            name: mapped_tensor(entry.path, _DTYPES[entry.dtype], entry.shape, entry.start)
            for name, entry in self.entries.items()
        }

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return the shape of a tensor; None if it does not exist."""
        entry = self.entries.get(name)
        return None if entry is None else entry.shape

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """Yield a tensor in the file's dtype, in blocks with the index of their first weight."""
        return _blocks(self.entries[name])


def class_of(config: Any) -> Any:
    """Return the only language model class of a config (it may read media); None if there are several or none."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    text_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    full_class = MODEL_FOR_MULTIMODAL_LM_MAPPING.get(type(config), text_class)
    return None if isinstance(text_class, tuple) or full_class is not text_class else text_class


def config_of(folder: Path) -> Any:
    """Return the config of a folder that ``from_pretrained`` can load with given tensors; otherwise None."""
    from huggingface_hub.errors import StrictDataclassError

    from gym_fed.base.modeling.config_checks import load_config
    from gym_fed.base.modeling.mixture_of_depths import is_mixture_of_depths

    if is_mixture_of_depths(folder):
        return None
    try:
        config = load_config(folder)
    except (OSError, ValueError, KeyError, StrictDataclassError):  # loading reports it
        return None
    return config if class_of(config) is not None else None


def _blocks(entry: FileTensor) -> Iterator[tuple[int, Tensor]]:
    for at, raw in entry.blocks():
        yield at, torch.frombuffer(raw, dtype=_DTYPES[entry.dtype])


def _separate_tensor(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros in its own mapping, which is freed with its last reference.

    The C library's heap would keep the holes between tensors that stay, while a server packs one after the other.
    """
    count = math.prod(shape)
    if count * dtype.itemsize < mmap.PAGESIZE:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype, count=count).view(shape)


_maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Mappings by the address of their tensor; an entry disappears with the last reference to its tensor."""


def mapped_tensor(path: Path, dtype: torch.dtype, shape: tuple[int, ...], start: int) -> Tensor:
    """Map a tensor from byte ``start`` of a file, in its own private mapping.

    Its pages are read on use, and are released with the last reference to it, independently of other tensors.
    """
    count = math.prod(shape) * dtype.itemsize
    if not count:  # mmap rejects a length of zero
        return torch.empty(shape, dtype=dtype)
    before = start % mmap.ALLOCATIONGRANULARITY
    with path.open("rb") as file:
        view = mmap.mmap(file.fileno(), before + count, access=mmap.ACCESS_COPY, offset=start - before)
    tensor = torch.from_numpy(np.frombuffer(view, np.uint8, count, before)).view(dtype).reshape(shape)
    _maps[tensor.data_ptr()] = view
    return tensor


def release_pages(tensor: Tensor) -> None:
    """Release a mapped tensor's pages; they are read again when it is used.

    Data written to the tensor is lost. Other tensors are unaffected; systems without ``madvise`` do nothing.
    """
    view = _maps.get(tensor.data_ptr())
    if view is not None and hasattr(mmap, "MADV_DONTNEED"):
        view.madvise(mmap.MADV_DONTNEED)
