"""Updates clipped onto a lattice: whole numbers whose L2 norm is below a bound exactly, whatever floats did before.

A clipped value is divided by the lattice's step and cut off towards zero. That never makes a vector longer, so the
integers have the clip's norm at most: the sqrt(d) that rounding to the nearest would cost is not paid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_fed.core.errors import ErrorCode, GymError

UNITS = 1 << 20
"""The clipping norm in steps of the lattice."""

GUARD = 1.0 - 1e-6
"""Clips end this far inside the bound, so that the last bits of a norm in float64 cannot take one over it."""

Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


def scale_factors(
    norms: Sequence[Sequence[float]], clipping_norm: float, per_layer: bool, *, lengthen: bool = False
) -> Floats:
    """What each tensor of each update is multiplied by to be within the clip, in steps of the lattice.

    Args:
        norms: L2 norm of every one of the L tensors that an update may hold, for each of n updates; not a number or
            infinite where it overflows float64, and the update counts as zero then.
        clipping_norm: The bound, C.
        per_layer: Clip each tensor to ``C / sqrt(L)`` instead of the whole to C.
        lengthen: Bring shorter ones to the bound, too.

    Returns:
        ``[n, L]`` float64.
    """
    found = np.asarray(norms, dtype=np.float64).reshape(len(norms), -1)
    if per_layer:
        bound, own = 1.0 / math.sqrt(max(1, found.shape[1])), found
    else:
        bound, own = 1.0, np.broadcast_to(np.array([whole_norm(row) for row in found])[:, None], found.shape)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        steps = UNITS * np.minimum(bound / own, np.inf if lengthen else 1.0 / clipping_norm) * GUARD
    return np.where(np.isfinite(own) & np.isfinite(steps), steps, 0.0)


def whole_norm(norms: Sequence[float] | Floats) -> float:
    """L2 norm of a vector from those of its parts."""
    return math.sqrt(math.fsum(float(norm) ** 2 for norm in norms))


def on_lattice(values: NDArray[np.floating], factors: Floats) -> Integers:
    """Rows times their factors, cut off towards zero: ``[n, k]`` floats, ``[n]`` to ``[n, k]`` int64."""
    with np.errstate(invalid="ignore"):
        scaled = values.astype(np.float64) * factors[:, None]
    scaled[factors == 0.0] = 0.0  # what overflowed counts as zero
    np.trunc(scaled, out=scaled)
    if not bool((np.abs(scaled) <= UNITS).all()):  # not a number fails too
        raise _beyond()
    return scaled.astype(np.int64)


class Ruler:
    """Adds up the squared norms of the integers that are really used, update by update, tensor by tensor.

    The bound follows from how the factors were made. Should it not hold, the sensitivity would not either, and nothing
    may be released.
    """

    def __init__(self, updates: int) -> None:
        self._squares: dict[str, Integers] = {}
        self._total = np.zeros(updates, dtype=np.int64)

    def begin(self, name: str) -> None:
        """What follows is this tensor from its first value on; measured before, it counts afresh."""
        self._total -= self._squares.pop(name, 0)
        self._squares[name] = np.zeros_like(self._total)

    def add(self, name: str, integers: Integers) -> None:
        """Measure a block ``[n, k]`` of a tensor, values of at most ``UNITS``.

        Raises:
            GymError: ``INTERNAL`` as soon as an update is over the bound.
        """
        squares = np.square(integers).sum(axis=1)
        self._squares[name] += squares
        self._total += squares
        if bool((self._total > UNITS * UNITS).any()):
            raise _beyond()

    @property
    def squares(self) -> Integers:
        """``[n]`` squared norms of what was measured."""
        return self._total.copy()


def _beyond() -> GymError:
    return GymError(
        ErrorCode.INTERNAL,
        "a clipped update is above the clipping norm; nothing was released",
        "this must not happen: report it with the codec of the round's updates",
    )
