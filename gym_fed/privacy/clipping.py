"""Clip updates to an integer lattice with an exact L2 bound, and adapt the clipping norm.

A clipped value is divided by the step of the lattice and truncated towards zero. Truncation never makes a vector
longer, so the norm of the integers is at most the clipping norm. Rounding to nearest would cost a factor sqrt(d).

The clipping norm can follow a quantile of the updates' norms, which is estimated privately (Andrew et al. 2021,
"Differentially Private Learning with Adaptive Clipping", arXiv:1905.03871, algorithm 1). Every update reports whether
its norm is within the clipping norm. The hub gets the noisy count, and the clipping norm moves a geometric step towards
the target quantile. A contributor reports +1/2 or -1/2. One that is zeroed out reports neither, although it is counted
in the public n, so the sensitivity is 1/2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gym_fed.config.hub.privacy import AdaptiveClipping
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.privacy.noise import NoiseSource

UNITS = 1 << 20
"""The clipping norm as a number of lattice steps."""

GUARD = 1.0 - 1e-6
"""Factor by which clipped norms stay below the bound, so that float64 rounding errors in a norm cannot exceed it."""

Integers: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


def scale_factors(
    norms: Sequence[Sequence[float]], clipping_norm: float, per_layer: bool, *, lengthen: bool = False
) -> Floats:
    """Compute the factors, in lattice steps, that clip each tensor of each update.

    Args:
        norms: L2 norms of the L tensors that an update may contain, for each of n updates. NaN or infinite if a norm
            overflows float64; the whole update then counts as zero.
        clipping_norm: The bound, C.
        per_layer: Clip each tensor to ``C / sqrt(L)`` instead of the whole update to C.
        lengthen: Also scale shorter updates or tensors up to the bound.

    Returns:
        The factors, ``[n, L]`` float64.
    """
    tensor_norms = np.asarray(norms, dtype=np.float64).reshape(len(norms), -1)
    if per_layer:
        bound, own = 1.0 / math.sqrt(max(1, tensor_norms.shape[1])), tensor_norms
    else:
        bound, own = (
            1.0,
            np.broadcast_to(np.array([whole_norm(row) for row in tensor_norms])[:, None], tensor_norms.shape),
        )
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        steps = UNITS * np.minimum(bound / own, np.inf if lengthen else 1.0 / clipping_norm) * GUARD
    return np.where(np.isfinite(own) & np.isfinite(steps), steps, 0.0)


def whole_norm(norms: Sequence[float] | Floats) -> float:
    """Return the L2 norm of a vector, given the norms of its parts."""
    return math.sqrt(math.fsum(float(norm) ** 2 for norm in norms))


def on_lattice(values: NDArray[np.floating], factors: Floats) -> Integers:
    """Scale rows and truncate towards zero: ``[n, k]`` floats and ``[n]`` factors give ``[n, k]`` int64."""
    with np.errstate(invalid="ignore"):
        scaled = values.astype(np.float64) * factors[:, None]
    scaled[factors == 0.0] = 0.0  # overflowed values count as zero
    np.trunc(scaled, out=scaled)
    if not bool((np.abs(scaled) <= UNITS).all()):  # also catches NaN
        raise _beyond()
    return scaled.astype(np.int64)


class Ruler:
    """Measures the squared norms of the lattice integers of each update, and enforces the bound.

    The factors already guarantee the bound. If it were exceeded, the sensitivity would be wrong, so nothing is
    released.
    """

    def __init__(self, updates: int) -> None:
        self._squares: dict[str, Integers] = {}
        self._total = np.zeros(updates, dtype=np.int64)

    def begin(self, name: str) -> None:
        """Start measuring a tensor before its first value; a repeated tensor is measured again from the start."""
        self._total -= self._squares.pop(name, 0)
        self._squares[name] = np.zeros_like(self._total)

    def add(self, name: str, integers: Integers) -> None:
        """Measure a block of a tensor, ``[n, k]`` integers of magnitude at most ``UNITS``.

        Raises:
            GymError: ``INTERNAL`` as soon as an update exceeds the bound.
        """
        squares = np.square(integers).sum(axis=1)
        self._squares[name] += squares
        self._total += squares
        if bool((self._total > UNITS * UNITS).any()):
            raise _beyond()

    @property
    def squares(self) -> Integers:
        """The squared norms measured so far, ``[n]``."""
        return self._total.copy()


def _beyond() -> GymError:
    return GymError(
        ErrorCode.INTERNAL,
        "a clipped update is above the clipping norm; nothing was released",
        "report this bug with the codec of the round's updates",
    )


_UNITS = 1 << 20
"""Lattice steps per update in the count of updates, so that the count's noise is also on a lattice."""

STREAM = "count"


def noise_left(noise_multiplier: float, adaptive: AdaptiveClipping | None) -> float:
    """Return the noise multiplier at which sum and count together cost as much as ``noise_multiplier`` alone.

    Theorem 1 of the paper: ``z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)``.
    """
    if adaptive is None:
        return noise_multiplier
    left = noise_multiplier**-2 - (2.0 * adaptive.count_noise_std) ** -2
    return float(left**-0.5)


def next_norm(
    clipping_norm: float, within: int, updates: int, adaptive: AdaptiveClipping, noise: NoiseSource
) -> float:
    """Compute the clipping norm of the next round.

    Args:
        clipping_norm: Clipping norm of this round.
        within: Exact number of updates whose norm is within the clipping norm; noise is added to it here.
        updates: Number of updates, which is public.
        adaptive: Settings for the quantile, step and noise.
        noise: Noise source of the round.
    """
    halves = within * _UNITS - updates * (_UNITS // 2)
    drawn = int(noise.rounded_gaussian(adaptive.count_noise_std * _UNITS, 1, STREAM)[0])
    share = (halves + drawn) / (updates * _UNITS) + 0.5
    return clipping_norm * math.exp(-adaptive.learning_rate * (share - adaptive.target_quantile))
