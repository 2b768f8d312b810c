"""The digest of a model's weights, computed from its safetensors files; no torch is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.base.modeling.tensor_files import FileTensor, file_tensors
from gym_fed.core.json_files import read_object
from gym_fed.trust.identity.canonical import canonical_json

if TYPE_CHECKING:
    import torch


def tensor_head(name: str, dtype: torch.dtype | str, shape: Sequence[int]) -> bytes:
    """What ``tensors_digest`` hashes before a tensor's bytes; ``dtype`` is torch's, or its name alone."""
    head = canonical_json([name, str(dtype).removeprefix("torch."), list(shape)])
    return len(head).to_bytes(8, "little") + head


def float32_digest(tensors: Mapping[str, FileTensor], names: Iterable[str]) -> str:
    """``tensors_digest`` of the files' tensors in float32, read block by block; ``names`` are sorted."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(tensor_head(name, "float32", tensors[name].shape))
        for block in tensors[name].float32_blocks():
            digest.update(block.data)
    return f"sha256:{digest.hexdigest()}"


def folder_digest(folder: Path) -> str | None:
    """The digest of a model folder's tensors in float32, whatever dtype and shards its files have.

    A head that is tied to the embeddings is not counted, since not every copy stores it.

    Returns:
        None where the weights are in other files.
    """
    tensors = file_tensors(folder)
    if tensors is None:
        return None
    file = folder / "config.json"
    tied = file.is_file() and read_object(file).get("tie_word_embeddings", False)
    names = sorted(name for name in tensors if not (tied and name == "lm_head.weight"))
    return float32_digest(tensors, names)
