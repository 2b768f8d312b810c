"""Count the weights of a model on this machine from the headers of its files, without torch."""

from __future__ import annotations

import math
from pathlib import Path

from gym_fed.base.modeling.tensor_files import tensor_shapes
from gym_fed.base.models import resolve
from gym_fed.core.errors import GymError


def count_stored_weights(name: str) -> int | None:
    """Count the weights in a model folder's safetensors files.

    Args:
        name: A model name or path, as for ``load_model``.

    Returns:
        The number; None if the model is not on this machine, or its weights are quantised or in other formats.
    """
    try:
        shapes = tensor_shapes(Path(resolve(name)))
    except GymError:
        return None
    return None if shapes is None else sum(map(math.prod, shapes.values()))
