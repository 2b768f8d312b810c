"""The largest eigenvalue of a symmetric matrix and its direction, without a BLAS."""

from __future__ import annotations

import math

import numpy as np

from gym_fed.soup.ordered import Array, dot, symmetric_times

_TOLERANCE = 1e-8
_MOST_STEPS = 300
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


def top_eigenvector(matrix: Array) -> tuple[float, Array]:
    """By locally optimal conjugate gradients (Knyazev 2001, "Toward the Optimal Preconditioned Eigensolver").

    It stops at a residual of 1e-8 of the eigenvalue, or after 300 steps: where the largest eigenvalues lie that close
    together, the direction found is one among theirs, the same at every run.

    Args:
        matrix: ``[n, n]`` float64, positive semi-definite.

    Returns:
        The eigenvalue, and its direction ``[n]`` of length 1.
    """
    count = len(matrix)
    peak = float(np.abs(matrix).max())
    vector = _unit(np.array([(k + 1) * _GOLDEN % 1.0 - 0.5 for k in range(count)]))
    if peak == 0.0:
        return 0.0, vector
    scaled = matrix / peak
    image = symmetric_times(scaled, vector)
    before: Array | None = None
    value = dot(vector, image)
    for _ in range(_MOST_STEPS):
        rest = image - value * vector
        if math.sqrt(dot(rest, rest)) <= _TOLERANCE * value:
            break
        basis, images = [vector], [image]
        for candidate in (rest, before):
            fresh = None if candidate is None else _orthogonal(candidate, basis)
            if fresh is not None:
                basis.append(fresh)
                images.append(symmetric_times(scaled, fresh))
        small = np.array([[dot(left, right) for right in images] for left in basis])
        mix = np.linalg.eigh((small + small.T) / 2.0).eigenvectors[:, -1]  # 3 by 3
        before = sum((part * b for part, b in zip(mix[1:], basis[1:], strict=True)), np.zeros(count))
        vector = _unit(mix[0] * vector + before)
        image = symmetric_times(scaled, vector)
        value = dot(vector, image)
    return value * peak, vector


def _orthogonal(vector: Array, basis: list[Array]) -> Array | None:
    """The part of a vector outside a basis, made of length 1; None where nothing of it is."""
    length = math.sqrt(dot(vector, vector))
    if length == 0.0:
        return None
    rest = vector / length
    for _ in range(2):  # twice, for the digits that the first round cancels
        for other in basis:
            rest = rest - dot(rest, other) * other
        size = math.sqrt(dot(rest, rest))
        if size < 1e-14:
            return None
        rest = rest / size
    return rest


def _unit(vector: Array) -> Array:
    found: Array = vector / math.sqrt(dot(vector, vector))
    return found
