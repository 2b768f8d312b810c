"""The number of weights and the quantisation of a model on this machine, read from its files without torch."""

from __future__ import annotations

import math
from pathlib import Path

from gym_fed.base.modeling.tensor_files import tensor_shapes
from gym_fed.base.models import resolve
from gym_fed.core.errors import GymError
from gym_fed.core.json_files import read_object


def count_stored_weights(name: str) -> int | None:
    """Count the weights in a model folder's safetensors files.

    Args:
        name: A model name or path, as for ``load_model``.

    Returns:
        The number; None if the model is not on this machine, or its weights are quantised or in unsupported formats.
    """
    try:
        shapes = tensor_shapes(Path(resolve(name)))
    except GymError:
        return None
    return None if shapes is None else sum(map(math.prod, shapes.values()))


def prequantised(model: str | None) -> str | None:
    """Return the quantisation method in a model's ``config.json``; None if it has none or is not on this machine."""
    if model is None:
        return None
    try:
        file = Path(resolve(model)) / "config.json"
    except GymError:
        return None  # loading reports it
    if not file.is_file():
        return None
    section = read_object(file).get("quantization_config")
    if not isinstance(section, dict) or not section:
        return None
    name = str(section.get("quant_method", "unknown"))
    return "bitsandbytes" if name.startswith("bitsandbytes") else name
