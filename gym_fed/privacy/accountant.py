"""Compute the privacy cost of a sequence of noisy releases with dp-accounting.

Gaussian releases without sampling are equivalent to a single release, whose epsilon has a closed form (Balle and Wang
2018, theorem 8). If some releases are sampled, privacy loss distributions are used (Koskela et al. 2020; Doroshenko et
al. 2022). They bound epsilon from above, up to the width of a grid. A discrete Gaussian on vectors has no
one-dimensional privacy loss distribution, but its Renyi divergences are bounded by those of the Gaussian with the same
variance (Canonne, Kamath, Steinke 2020, theorem 14). If any release is discrete, Renyi divergences are therefore used
for all releases. They also give an upper bound, which is somewhat looser. They are also used where the distributions
would need gigabytes, since the events of a hub's recipe are accounted for before its contributors agree to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from gym_fed.config.hub.privacy import Mechanism
from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

_GRID = 1e-4
"""Width of the grid of privacy losses; the default of dp-accounting."""
_ROOT_ERROR = 1e-9
"""Added to the closed form, which dp-accounting solves to 1e-12, so that the result is an upper bound."""
_MAX_CELLS = 1_000_000
"""Maximum grid size. With very little noise (epsilon in the hundreds), a coarser grid is used to stay within it, which
loosens the bound by a relative 1e-6."""
_MAX_PLD_LOSS = 1e8
"""Maximum privacy loss of an event whose distribution is computed; the computation overflows above 1e10."""
_MIN_MULTIPLIER = 1e-4
"""Minimum noise multiplier, at which the epsilon of one release is about 50 million."""
_MAX_PLD_EPSILON = 1000
_MAX_PLD_RELEASES = 1_000_000
"""Limits of privacy loss distributions, which take seconds and about 1 GB at either limit. Above them, epsilon is
bounded by Renyi divergences; an epsilon of 1,000 gives no meaningful privacy."""
_MAX_KINDS = 8
"""Maximum number of distinct sampled events, which take seconds each. If there are more, similar events are merged: a
hub can change its noise every round."""
_FIRST_STEP = 1e-3
"""Relative width of the finest rounding."""
_ORDERS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
"""Orders of the Renyi divergences of many sampled releases; integers, for which dp-accounting has a finite sum."""
_MAX_LOSS = 1e4
"""Maximum privacy loss for the closed form; above it, rounding errors approach ``_ROOT_ERROR``."""
_MAX_MULTIPLIER = 8192
"""Maximum noise multiplier that is searched."""
MAX_TARGET_EPSILON = 1000
"""Maximum target epsilon for a noise multiplier; much smaller values already give no meaningful privacy."""


class NoiseEvent(StrictModel):
    """A noisy release, or ``count`` releases with the same parameters.

    ``noise_multiplier`` is the standard deviation of the noise divided by the L2 sensitivity. If
    ``sampling_probability`` is q < 1, each record takes part independently with probability q (Poisson sampling;
    neighbouring datasets differ by adding or removing one record).
    """

    mechanism: Mechanism = "gaussian"
    noise_multiplier: Annotated[float, Field(gt=0)]
    sampling_probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    count: Annotated[int, Field(ge=1)] = 1


def epsilon(events: Sequence[NoiseEvent], target_delta: float) -> float:
    """Return an upper bound on the epsilon of all events under adaptive composition.

    Args:
        events: The releases; epsilon is 0 if there are none.
        target_delta: Delta, in (0, 1).

    Raises:
        GymError: ``CONFIG_INVALID`` for a delta out of range or noise that is too small to compute with;
            ``MISSING_DEPENDENCY`` if dp-accounting is not installed.
    """
    _require_probability(target_delta)
    if not events:
        return 0.0
    least = min(event.noise_multiplier for event in events)
    if least < _MIN_MULTIPLIER:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"noise_multiplier is {least:g}, below {_MIN_MULTIPLIER:g}: so little noise gives no privacy",
            "raise noise_multiplier; 1 is usual",
        )
    return _epsilon(_collected(events), target_delta)


def accountant_name(events: Sequence[NoiseEvent], target_delta: float) -> str:
    """Return the name of the accountant that ``epsilon`` uses for these events: ``pld`` or ``rdp``."""
    collected = _collected(events)
    is_discrete = any(event.mechanism == "discrete_gaussian" for event in collected)
    return "rdp" if is_discrete or _is_too_large(collected, target_delta) else "pld"


def noise_multiplier_for(
    target_epsilon: float, target_delta: float, *, sampling_probability: float = 1.0, count: int = 1
) -> float:
    """Return the smallest noise multiplier, to 0.1%, at which ``count`` Gaussian releases stay within the target.

    Raises:
        GymError: ``CONFIG_INVALID`` for a target that is not in (0, ``MAX_TARGET_EPSILON``], or if a noise multiplier
            of ``_MAX_MULTIPLIER`` is not enough.
    """
    if not 0 < target_epsilon <= MAX_TARGET_EPSILON:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"target_epsilon is {target_epsilon:g}, but must be above 0 and at most {MAX_TARGET_EPSILON:,}",
            "8 is usual; far more gives no privacy",
        )
    _require_probability(target_delta)

    def cost(noise_multiplier: float) -> float:
        event = NoiseEvent(
            noise_multiplier=noise_multiplier, sampling_probability=sampling_probability, count=count
        )
        return epsilon([event], target_delta)

    low, high = 0.0, 1.0
    if sampling_probability == 1.0:
        # Without these bounds, the search would try multipliers whose accounting takes minutes.
        low, high = _bracket(target_epsilon, target_delta, count)
    while high <= _MAX_MULTIPLIER and cost(high) > target_epsilon:
        low, high = high, 2 * high
    if high > _MAX_MULTIPLIER:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"epsilon {target_epsilon} at delta {target_delta} cannot be reached in {counted(count, 'step')}",
            "allow a larger epsilon, or fewer steps",
        )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if cost(middle) <= target_epsilon else (middle, high)
        if high < 1e-3:
            break
    return high


def _require_probability(target_delta: float) -> None:
    if not 0 < target_delta < 1:
        raise GymError(
            ErrorCode.CONFIG_INVALID, f"target_delta is {target_delta}, but must be between 0 and 1"
        )


def _bracket(target_epsilon: float, target_delta: float, count: int) -> tuple[float, float]:
    """Return bounds, 0.1% apart, on the noise multiplier of ``count`` Gaussian releases without sampling."""
    _dp_accounting()
    from dp_accounting.gaussian_mechanism import get_sigma_gaussian

    least = math.sqrt(count) * float(get_sigma_gaussian(target_epsilon, target_delta))
    return 0.9995 * least, 1.0004 * least


def _collected(events: Sequence[NoiseEvent]) -> tuple[NoiseEvent, ...]:
    """Group equal events, and combine all unsampled events of a mechanism into one equivalent event.

    Releases with multipliers z_i, even if chosen adaptively, are equivalent to one release with multiplier (sum
    z_i^-2)^(-1/2): Dong, Roth and Su 2022, "Gaussian Differential Privacy", corollary 3.3.
    """
    counts: dict[tuple[Any, ...], int] = {}
    precision = {"gaussian": 0.0, "discrete_gaussian": 0.0}
    for event in events:
        if event.sampling_probability == 1.0:
            precision[event.mechanism] += event.count / event.noise_multiplier**2
        else:
            key = (event.mechanism, event.noise_multiplier, event.sampling_probability)
            counts[key] = counts.get(key, 0) + event.count
    collected = [
        NoiseEvent(mechanism=mechanism, noise_multiplier=1 / math.sqrt(total))
        for mechanism, total in precision.items()
        if total
    ]
    collected += [
        NoiseEvent(mechanism=m, noise_multiplier=z, sampling_probability=q, count=count)
        for (m, z, q), count in sorted(_coarsened(counts).items())
    ]
    return tuple(collected)


def _coarsened(counts: dict[tuple[Any, ...], int]) -> dict[tuple[Any, ...], int]:
    """Merge similar sampled events until at most ``_MAX_KINDS`` are left.

    A merged event has the least noise and the largest sampling probability of its members: the cost is an upper bound.
    """
    step = _FIRST_STEP
    while len(counts) > _MAX_KINDS:
        members: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        for key in counts:
            mechanism, z, q = key
            cell = (mechanism, math.floor(math.log(z) / step), math.ceil(math.log(q) / step))
            members.setdefault(cell, []).append(key)
        counts = {
            (cell[0], min(z for _, z, _ in keys), max(q for _, _, q in keys)): sum(
                counts[key] for key in keys
            )
            for cell, keys in members.items()
        }
        step *= 2
    return counts


@lru_cache(maxsize=1024)
def _epsilon(events: tuple[NoiseEvent, ...], target_delta: float) -> float:
    _dp_accounting()
    if _is_one_whole_gaussian(events):
        from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

        return float(get_epsilon_gaussian(events[0].noise_multiplier, target_delta)) + _ROOT_ERROR
    if accountant_name(events, target_delta) == "rdp":
        from dp_accounting.rdp import RdpAccountant

        accountant = RdpAccountant(_ORDERS) if _is_too_large(events, target_delta) else RdpAccountant()
    else:
        from dp_accounting.pld import PLDAccountant

        accountant = PLDAccountant(
            value_discretization_interval=max(_GRID, _widest_loss(events) / _MAX_CELLS)
        )
    return _composed(accountant, events, target_delta)


def _is_too_large(events: tuple[NoiseEvent, ...], target_delta: float) -> bool:
    """Return True if the events exceed a limit of privacy loss distributions."""
    if _widest_loss(events) > _MAX_PLD_LOSS:
        return True
    releases = sum(event.count for event in events if event.sampling_probability < 1.0)
    if releases <= 1:  # the distribution of one release is small
        return False
    return releases > _MAX_PLD_RELEASES or _renyi_epsilon(events, target_delta) > _MAX_PLD_EPSILON


@lru_cache(maxsize=1024)
def _renyi_epsilon(events: tuple[NoiseEvent, ...], target_delta: float) -> float:
    _dp_accounting()
    from dp_accounting.rdp import RdpAccountant

    return _composed(RdpAccountant(_ORDERS), events, target_delta)


def _composed(accountant: Any, events: tuple[NoiseEvent, ...], target_delta: float) -> float:
    dp = _dp_accounting()
    for event in events:
        dp_event = dp.GaussianDpEvent(event.noise_multiplier)
        if event.sampling_probability < 1.0:
            if event.mechanism == "discrete_gaussian":
                raise GymError(
                    ErrorCode.CONFIG_INVALID,
                    "the discrete Gaussian mechanism with sampled contributors cannot be accounted for",
                    "use mechanism: gaussian, or no sampling",
                )
            dp_event = dp.PoissonSampledDpEvent(event.sampling_probability, dp_event)
        accountant.compose(dp_event, event.count)
    return float(accountant.get_epsilon(target_delta))


def _is_one_whole_gaussian(events: tuple[NoiseEvent, ...]) -> bool:
    """Return True if the closed form applies and is accurate enough."""
    kinds = [(event.mechanism, event.sampling_probability) for event in events]
    return kinds == [("gaussian", 1.0)] and _widest_loss(events) <= _MAX_LOSS


def _widest_loss(events: Sequence[NoiseEvent]) -> float:
    """Approximate the largest privacy loss of an event; for a Gaussian it is normal with mean 1/2z^2, deviation 1/z."""
    return max(0.5 / e.noise_multiplier**2 + 10 / e.noise_multiplier for e in events)


def _dp_accounting() -> Any:
    try:
        import dp_accounting
    except ImportError as error:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            "privacy is accounted for by dp-accounting, which is not installed",
            "pip install 'gym-fed[privacy]'",
        ) from error
    return dp_accounting
