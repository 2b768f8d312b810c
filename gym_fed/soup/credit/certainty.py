"""How certain a gain in held-out loss is: standard errors and lower confidence bounds from blocks of rows.

A gain is a ratio: nats that were saved, over tokens. Its error is taken by linearisation (Cochran 1977, "Sampling
Techniques", sec. 2.11): with d_k what block k adds to the gain G and w_k its share of the tokens, the residuals
``d_k - G w_k`` are independent, so that the variance is ``K / (K - 1) * sum_k (d_k - G w_k)^2``.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Vector: TypeAlias = "NDArray[np.float64]"

CONFIDENCE = 0.95
"""One-sided."""


def standard_error(parts: Vector, block_weights: Vector) -> Vector:
    """Standard errors of gains.

    Args:
        parts: ``[..., k]`` what each block of held-out rows adds to each gain.
        block_weights: ``[k]`` shares of the held-out tokens.

    Returns:
        ``[...]``; infinite for fewer than two blocks.
    """
    blocks = len(block_weights)
    if blocks < 2:
        return np.full(parts.shape[:-1], np.inf)
    residuals = parts - parts.sum(axis=-1, keepdims=True) * block_weights
    return np.asarray(np.sqrt(blocks / (blocks - 1) * (residuals**2).sum(axis=-1)))


def lower_bound(parts: Vector, block_weights: Vector) -> float:
    """What a gain exceeds with ``CONFIDENCE``; minus infinity for fewer than two blocks.

    Args:
        parts: ``[k]`` what each block adds to the gain.
        block_weights: ``[k]`` shares of the held-out tokens.
    """
    if len(block_weights) < 2:
        return -math.inf
    error = float(standard_error(parts, block_weights))
    return float(parts.sum()) - student_quantile(len(block_weights) - 1) * error


def student_quantile(freedom: int) -> float:
    """The ``CONFIDENCE`` quantile of Student's t, to 1% (Abramowitz and Stegun 1964, 26.7.5)."""
    if freedom == 1:
        return math.tan(math.pi * (CONFIDENCE - 0.5))
    if freedom == 2:
        centred = 2 * CONFIDENCE - 1
        return centred * math.sqrt(2 / (1 - centred**2))
    z = NormalDist().inv_cdf(CONFIDENCE)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
