"""The largest eigenvalue of a symmetric matrix and its direction, without a BLAS or LAPACK."""

from __future__ import annotations

import math

import numpy as np

from gym_fed.soup.linalg.ordered import Array, symmetric_times

_TOLERANCE = 1e-9
_MOST_STEPS = 64


def top_eigenvector(matrix: Array) -> tuple[float, Array]:
    """By Lanczos' iteration with full reorthogonalisation (Golub and Van Loan 2013, "Matrix Computations", 10.3.4).

    Up to n = 64 the answer is exact but for rounding. Above, it stops at a residual of 1e-9 of the eigenvalue or after
    64 steps: where the largest eigenvalues lie so close together that these do not part them, the direction found is
    one among theirs, the same at every run.

    Args:
        matrix: ``[n, n]`` float64, positive semi-definite.

    Returns:
        The eigenvalue, and its direction ``[n]`` of length 1.
    """
    count = len(matrix)
    peak = float(np.abs(matrix).max())
    vector: Array = np.random.RandomState(0).random_sample(count) - 0.5  # the same in every version of numpy
    vector = vector / math.sqrt(_dot(vector, vector))
    if peak == 0.0:
        return 0.0, vector
    scaled, most = matrix / peak, min(count, _MOST_STEPS)
    basis = np.empty((most, count))
    middle: list[float] = []
    beside: list[float] = []
    while True:
        known = len(middle) + 1
        basis[known - 1] = vector
        rest: Array = symmetric_times(scaled, vector)
        middle.append(_dot(vector, rest))
        for _ in range(2):  # twice, for the digits that the first round cancels
            overlaps = np.einsum("kn,n->k", basis[:known], rest, optimize=False)
            rest = rest - np.einsum("k,kn->n", overlaps, basis[:known], optimize=False)
        left = math.sqrt(_dot(rest, rest))
        is_last = known == most or left < 1e-14
        if is_last or known % 16 == 0:
            value, parts = _top_of_tridiagonal(middle, beside)
            if is_last or left * abs(parts[-1]) <= _TOLERANCE * value:
                break
        beside.append(left)
        vector = rest / left
    vector = np.einsum("k,kn->n", np.array(parts), basis[:known], optimize=False)
    return value * peak, vector / math.sqrt(_dot(vector, vector))


def _top_of_tridiagonal(middle: list[float], beside: list[float]) -> tuple[float, list[float]]:
    """The largest eigenvalue and its direction of length 1.

    Bisection comes near, Newton's steps on the characteristic polynomial come down to it from above, where they cannot
    overshoot, inverse iteration from there finds the direction, and the value is the direction's.
    """
    reach = max(
        abs(m) + (abs(beside[k - 1]) if k else 0.0) + (abs(beside[k]) if k < len(beside) else 0.0)
        for k, m in enumerate(middle)
    )
    low, high = -reach, reach * (1.0 + 1e-14) + 1e-300
    for _ in range(12):
        guess = (low + high) / 2.0
        low, high = (guess, high) if _pivots(middle, beside, guess) is None else (low, guess)
    pivots = _pivots(middle, beside, high)
    assert pivots is not None, "it is Gershgorin's bound, or bisection found it above all eigenvalues"
    for _ in range(100):
        closer = high - 1.0 / _slope(beside, pivots)
        found = _pivots(middle, beside, closer)
        if found is None or closer >= high - 1e-15 * reach:
            break
        high, pivots = closer, found
    solved = [1.0] * len(middle)
    for _ in range(4):
        for k in range(1, len(solved)):
            solved[k] += solved[k - 1] * beside[k - 1] / pivots[k - 1]
        solved[-1] /= pivots[-1]
        for k in reversed(range(len(solved) - 1)):
            solved[k] = (solved[k] + beside[k] * solved[k + 1]) / pivots[k]
        size = math.hypot(*solved)
        solved = [part / size for part in solved]
    value = sum(m * part * part for m, part in zip(middle, solved, strict=True))
    value += 2.0 * sum(b * one * other for b, one, other in zip(beside, solved[:-1], solved[1:], strict=True))
    return value, solved


def _pivots(middle: list[float], beside: list[float], shift: float) -> list[float] | None:
    """Pivots of ``shift - matrix``, or None where one is not positive: an eigenvalue is as large as the shift."""
    found: list[float] = []
    for k, m in enumerate(middle):
        pivot = shift - m - (beside[k - 1] ** 2 / found[-1] if k else 0.0)
        if pivot <= 0.0:
            return None
        found.append(pivot)
    return found


def _slope(beside: list[float], pivots: list[float]) -> float:
    """Logarithmic derivative of the characteristic polynomial, which is the product of the pivots."""
    total, change = 0.0, 0.0
    for k, pivot in enumerate(pivots):
        change = 1.0 + (beside[k - 1] ** 2 * change / pivots[k - 1] ** 2 if k else 0.0)
        total += change / pivot
    return total


def _dot(left: Array, right: Array) -> float:
    return float(np.einsum("i,i->", left, right, optimize=False))
