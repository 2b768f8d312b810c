"""What a base is called by, read from the files of an ordinary model: its shapes, and the digest of its weights.

A hub describes its base so at its first command, without loading torch and the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from gym_fed.delta.base import BaseSpec, tensor_head
from gym_fed.modeling.tensor_files import FileTensor, file_tensors
from gym_fed.serving.forward.plain_config import plain_config, plain_shapes


def spec_of_files(folder: Path, name: str) -> BaseSpec | None:
    """What ``BaseSpec.of`` finds of a folder's model; None where only the loaded model shows it."""
    config = plain_config(folder)
    tensors = None if config is None else file_tensors(folder)
    if config is None or tensors is None or config.num_hidden_layers > len(tensors):
        return None
    shapes = {key: one.shape for key, one in sorted(tensors.items())}
    if shapes != plain_shapes(config):
        return None
    return BaseSpec(name, float32_digest(tensors, shapes), shapes)


def float32_digest(tensors: Mapping[str, FileTensor], names: Iterable[str]) -> str:
    """``tensors_digest`` of the files' tensors in float32, read block by block; ``names`` are sorted."""
    digest = hashlib.sha256()
    for name in names:
        digest.update(tensor_head(name, "float32", tensors[name].shape))
        for block in tensors[name].float32_blocks():
            digest.update(block.data)
    return f"sha256:{digest.hexdigest()}"
