"""Sums over contributors whose bits do not depend on threads: no BLAS, but one order, or one rounding."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
"""float64"""


def symmetric_times(matrix: Array, vector: Array) -> Array:
    """``matrix @ vector`` for a symmetric ``[n, n]`` float64, in one fixed order."""
    found: Array = np.einsum("ij,j->i", matrix, vector, optimize=False)
    return found


def dot(left: Array, right: Array) -> float:
    """Inner product, its sum rounded once."""
    return math.fsum((left * right).tolist())
