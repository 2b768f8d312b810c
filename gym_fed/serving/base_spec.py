"""The identity of a base model, read from its files: tensor shapes and the digest of its weights.

A hub describes its base this way at its first command, without loading torch and the model.
"""

from __future__ import annotations

from pathlib import Path

from gym_fed.base.modeling.tensor_files import file_tensors, float32_digest, tensor_shapes
from gym_fed.base.models import folder_here
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.base import BaseSpec
from gym_fed.serving.forward.plain_config import plain_config, plain_shapes


def spec_of_files(folder: Path, name: str) -> BaseSpec | None:
    """Compute the ``BaseSpec`` of a folder's model from its files; None where the model has to be loaded."""
    config = plain_config(folder)
    tensors = None if config is None else file_tensors(folder)
    if config is None or tensors is None or config.num_hidden_layers > len(tensors):
        return None
    shapes = {key: tensor.shape for key, tensor in sorted(tensors.items())}
    if shapes != plain_shapes(config):
        return None
    return BaseSpec(name, float32_digest(tensors, shapes), shapes)


def require_all_tensors(name: str) -> None:
    """Refuse a base that lacks a tensor, by the headers of its files. Nothing is loaded.

    A base that is not on this machine, or whose architecture only transformers knows, is checked when it is loaded.

    Raises:
        GymError: ``MODEL_INVALID`` naming the tensor.
    """
    folder = folder_here(name)
    config = None if folder is None else plain_config(folder)
    tensors = None if folder is None else tensor_shapes(folder)
    if config is None or tensors is None or config.num_hidden_layers > len(tensors):
        return
    missing = sorted(plain_shapes(config).keys() - tensors.keys())
    if missing:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: {counted(len(missing), 'tensor')} missing from its weights, such as {missing[0]}",
            "restore its files; a missing tensor would be filled with random numbers",
        )
