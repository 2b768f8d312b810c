"""Add a delta to a model."""

from __future__ import annotations

import torch
from torch import nn

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.delta.base import Tensors, model_tensors
from gym_fed.delta.file import DeltaFile


def apply_delta(model: nn.Module | Tensors, delta: DeltaFile, scale: float = 1.0) -> None:
    """Add ``scale * delta`` to the model's tensors in place.

    The sum is taken in float32 and then cast to the tensor's dtype. Whether the delta belongs to this base is
    checked where it is opened (``DeltaFile.open(path, spec)``); here names and shapes must fit.

    Raises:
        GymError: ``BASE_MISMATCH`` naming the tensor; nothing was changed then.
    """
    tensors = model_tensors(model)
    for record in delta.manifest.tensors:
        if record.name not in tensors or tuple(tensors[record.name].shape) != record.shape:
            actual = list(tensors[record.name].shape) if record.name in tensors else "absent"
            raise GymError(
                ErrorCode.BASE_MISMATCH,
                f"{delta.path}: tensor {record.name!r} {list(record.shape)} does not fit the model: {actual}",
            )
    with torch.no_grad():
        for name in delta.names:
            target = tensors[name]
            change = delta.decode(name).mul_(scale).to(target.device)
            target.copy_(target.to(torch.float32) + change)
