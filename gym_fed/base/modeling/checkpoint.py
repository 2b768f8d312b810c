"""The weights of a model folder, read from its safetensors files block by block.

A base's digest is of its float32 weights. Read here, neither they nor the files are ever in memory as a whole: a model
that is served in bfloat16 takes the room of its bfloat16 weights, and one block beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gym_fed.base.modeling.mapped import mapped_tensor
from gym_fed.base.modeling.tensor_files import FileTensor, file_tensors

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class Checkpoint:
    """The tensors of one or several safetensors files, in float32, bfloat16 or float16.

    Attributes:
        entries: Where each is.
    """

    def __init__(self, entries: dict[str, FileTensor]) -> None:
        """Use ``find``."""
        self.entries = entries

    @classmethod
    def find(cls, folder: Path) -> Checkpoint | None:
        """Of a model folder; None as ``file_tensors``."""
        found = file_tensors(folder)
        return None if found is None else cls(found)

    def is_in(self, dtype: torch.dtype) -> bool:
        """Whether every tensor has this type, so that a model can use the mapped file."""
        return all(_DTYPES[entry.dtype] == dtype for entry in self.entries.values())

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Every tensor in a type, as ``from_pretrained`` takes it for ``state_dict``."""
        found = {}
        for name, entry in self.entries.items():
            whole = torch.empty(entry.shape, dtype=dtype)
            for at, block in _blocks(entry):
                whole.view(-1)[at : at + len(block)] = block.to(dtype)
            found[name] = whole
        return found

    def mapped(self) -> dict[str, Tensor]:
        """Every tensor as the file has it, each in a map of its own (``mapped_tensor``)."""
        return {
            name: mapped_tensor(entry.path, _DTYPES[entry.dtype], entry.shape, entry.start)
            for name, entry in self.entries.items()
        }

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor; None where there is none of that name."""
        entry = self.entries.get(name)
        return None if entry is None else entry.shape

    def blocks(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """A tensor's weights in the file's type, in blocks, each with the place of its first."""
        return _blocks(self.entries[name])


def class_of(config: Any) -> Any:
    """The class of a config's language model; None where there is not exactly one."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return None if isinstance(found, tuple) else found


def config_of(folder: Path) -> Any:
    """The config of a folder whose model ``from_pretrained`` can make of given tensors; None for others."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from gym_fed.base.modeling.mixture_of_depths import is_mixture_of_depths

    if is_mixture_of_depths(folder):
        return None
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, StrictDataclassError):  # loading will say so
        return None
    return config if class_of(config) is not None else None


def _blocks(entry: FileTensor) -> Iterator[tuple[int, Tensor]]:
    for at, raw in entry.blocks():
        yield at, torch.frombuffer(raw, dtype=_DTYPES[entry.dtype])
