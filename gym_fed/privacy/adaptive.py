"""The clipping norm follows a quantile of the updates' norms, itself found privately.

Andrew et al. 2021, "Differentially Private Learning with Adaptive Clipping" (arXiv:1905.03871), algorithm 1: every
update says whether it is within the norm, the hub learns how many are with noise, and the norm moves a geometric step
towards the wanted quantile. A contributor says +1/2 or -1/2; one that is zeroed out says neither, though it is among
the n that are public: sensitivity 1/2.
"""

from __future__ import annotations

import math

from gym_fed.config.hub.privacy import AdaptiveClipping
from gym_fed.privacy.noise import NoiseSource

_UNITS = 1 << 20
"""The number of updates is counted in these, so that the noise on it has a lattice too."""

STREAM = "count"


def noise_left(noise_multiplier: float, adaptive: AdaptiveClipping | None) -> float:
    """The noise multiplier of the sum with which sum and count together cost what ``noise_multiplier`` does.

    Theorem 1 of the paper: ``z_delta = (z^-2 - (2 sigma_b)^-2)^(-1/2)``.
    """
    if adaptive is None:
        return noise_multiplier
    left = noise_multiplier**-2 - (2.0 * adaptive.count_noise_std) ** -2
    return float(left**-0.5)


def next_norm(
    clipping_norm: float, within: int, updates: int, adaptive: AdaptiveClipping, noise: NoiseSource
) -> float:
    """The norm of the next round.

    Args:
        clipping_norm: This round's.
        within: How many of the updates are within it.
        updates: How many there are; public.
        adaptive: Quantile, step and noise.
        noise: The round's noise.
    """
    halves = within * _UNITS - updates * (_UNITS // 2)
    drawn = int(noise.rounded_gaussian(adaptive.count_noise_std * _UNITS, 1, STREAM)[0])
    share = (halves + drawn) / (updates * _UNITS) + 0.5
    return clipping_norm * math.exp(-adaptive.learning_rate * (share - adaptive.target_quantile))
