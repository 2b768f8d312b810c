"""The weights of a model folder, read from its safetensors files block by block.

A base's digest is of its float32 weights. Read here, neither they nor the files are ever in memory as a whole: a model
that is served in bfloat16 takes the room of its bfloat16 weights, and one block beside it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gym_fed.json_files import read_object
from gym_fed.modeling.mapped import mapped_tensor
from gym_fed.portable import O_BINARY, read_at

_BLOCK_WEIGHTS = 1 << 20
_INDEX, _WEIGHTS = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class _FileTensor:
    """Where a tensor is."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class Checkpoint:
    """The tensors of one or several safetensors files, in float32, bfloat16 or float16."""

    def __init__(self, entries: dict[str, _FileTensor]) -> None:
        """Use ``find``."""
        self._entries = entries

    @classmethod
    def find(cls, folder: Path) -> Checkpoint | None:
        """Of a model folder; None where its weights are in other files or types, or cannot be read.

        Loading the model then reports what is wrong.
        """
        from safetensors import SafetensorError

        try:
            files = [folder / _WEIGHTS]
            if not files[0].is_file():
                files = [
                    folder / name for name in sorted(set(read_object(folder / _INDEX)["weight_map"].values()))
                ]
            entries: dict[str, _FileTensor] = {}
            for file in files:
                entries |= _entries(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError):
            return None
        return cls(entries)

    def is_in(self, dtype: torch.dtype) -> bool:
        """Whether every tensor has this type, so that a model can use the mapped file."""
        return all(entry.dtype == dtype for entry in self._entries.values())

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every tensor in a type, as ``from_pretrained`` takes it for ``state_dict``."""
        found = {}
        for name, entry in self._entries.items():
            whole = torch.empty(entry.shape, dtype=dtype)
            for at, block in _blocks(entry):
                whole.view(-1)[at : at + len(block)] = block.to(dtype)
            found[name] = whole
        return found

    def mapped(self) -> dict[str, Tensor]:
        """Every tensor as the file has it, each in a map of its own (``mapped_tensor``)."""
        return {
            name: mapped_tensor(entry.path, entry.dtype, entry.shape, entry.start)
            for name, entry in self._entries.items()
        }

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor; None where there is none of that name."""
        entry = self._entries.get(name)
        return None if entry is None else entry.shape

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """A tensor's weights in the file's type, in blocks, each with the place of its first."""
        return _blocks(self._entries[name])


def class_of(config: Any) -> Any:
    """The class of a config's language model; None where there is not exactly one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return None if isinstance(found, tuple) else found


def config_of(folder: Path) -> Any:
    """The config of a folder whose model ``from_pretrained`` can make of given tensors; None for others."""
    from transformers import AutoConfig

    from gym_fed.modeling.mixture_of_depths import is_mixture_of_depths

    if is_mixture_of_depths(folder):
        return None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError):  # loading will say so
        return None
    return config if class_of(config) is not None else None


def _entries(path: Path) -> dict[str, _FileTensor]:
    """The tensors of a file, whose header safetensors has checked.

    Raises:
        ValueError: For a tensor of another type.
    """
    from safetensors import safe_open

    with safe_open(path, "pt"):
        pass
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    found = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"tensor {name!r} has the type {entry['dtype']}")
        start = 8 + length + entry["data_offsets"][0]
        found[name] = _FileTensor(path, _DTYPES[entry["dtype"]], tuple(entry["shape"]), start)
    return found


def _blocks(entry: _FileTensor) -> Iterator[tuple[int, Tensor]]:
    """A tensor's weights in blocks, each with the place of its first."""
    size = entry.dtype.itemsize
    total = math.prod(entry.shape)
    handle = os.open(entry.path, os.O_RDONLY | O_BINARY)
    try:
        for at in range(0, total, _BLOCK_WEIGHTS):
            count = min(_BLOCK_WEIGHTS, total - at)
            raw = bytearray(read_at(handle, count * size, entry.start + at * size))
            yield at, torch.frombuffer(raw, dtype=entry.dtype)
    finally:
        os.close(handle)
