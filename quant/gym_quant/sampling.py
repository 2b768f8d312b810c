"""The inputs of a search for shared numbers: the weight of each column, and a sample of very many values."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from gym_quant.bitstream import Floats
from gym_quant.codec import CodecError, check_finite

_SAMPLE = 1 << 20
_FLOOR = 1e-6


def column_weights(importance: Tensor, cols: int) -> Floats:
    """Importance (of a matrix: its diagonal) as ``[cols]`` float32 with mean 1, at least a millionth of it.

    Raises:
        CodecError: For a wrong length, and for values that are negative or not finite.
    """
    flat = importance.detach().to("cpu", torch.float32)
    if tuple(flat.shape) not in ((cols,), (cols, cols)):
        raise CodecError(f"importance has shape {list(importance.shape)}, not [{cols}] or [{cols}, {cols}]")
    check_finite(flat, "importance")
    flat = flat.diagonal() if flat.dim() == 2 else flat
    if bool((flat < 0).any()):
        raise CodecError(f"importance is negative: {float(flat.min())}")
    numbers = flat.numpy().astype(np.float64)
    mean = float(numbers.mean())
    if mean == 0.0:
        return np.ones(cols, dtype=np.float32)
    return np.maximum(numbers / mean, _FLOOR).astype(np.float32)


def sampled(values: Floats, weights: Floats | None) -> tuple[Floats, Floats | None]:
    """All values as one group ``[1, n]``, or, of more than a million, every k-th and the largest and smallest."""
    rows, cols = values.shape
    flat = values.reshape(-1)
    step = -(-flat.size // _SAMPLE)
    if step == 1:
        return flat[None], None if weights is None else np.tile(weights, rows)[None]
    while math.gcd(step, cols) != 1:
        step += 1
    at = np.concatenate([np.arange(0, flat.size, step), [int(flat.argmin()), int(flat.argmax())]])
    return flat[at][None], None if weights is None else weights[at % cols][None]
