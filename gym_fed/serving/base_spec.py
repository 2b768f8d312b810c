"""What a base is called by, read from the files of an ordinary model: its shapes, and the digest of its weights.

A hub describes its base so at its first command, without loading torch and the model.
"""

from __future__ import annotations

from pathlib import Path

from gym_fed.delta.base import BaseSpec
from gym_fed.modeling.tensor_digest import float32_digest
from gym_fed.modeling.tensor_files import file_tensors
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
