"""Account for the privacy cost of a sequence of noisy releases, with dp-accounting.

Whole Gaussian releases amount to one, whose epsilon has a closed form (Balle and Wang 2018, theorem 8). With sampled
ones among them they are accounted by privacy loss distributions (Koskela et al. 2020; Doroshenko et al. 2022), which
bound epsilon from above to the width of a grid. A discrete Gaussian on vectors has no such distribution of
one dimension; its Renyi divergences are bounded by those of the Gaussian of the same variance (Canonne, Kamath,
Steinke 2020, theorem 14), so as soon as one is among the releases all are accounted by Renyi divergences: somewhat
larger figures, and a bound too.
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

_GRID = 1e-4
"""Width of the grid of privacy losses, dp-accounting's own default."""
_ROOT_ERROR = 1e-9
"""Added to an epsilon that was searched for to 1e-12, so that it stays a bound."""
_MAX_CELLS = 1_000_000
"""Above this the grid is coarser (tiny noise, epsilons of hundreds): a bound looser by a millionth of itself."""


class NoiseEvent(StrictModel):
    """A noisy release, or ``count`` releases of one kind.

    ``noise_multiplier`` is the noise's standard deviation over the L2 sensitivity; with ``sampling_probability`` q
    below one every record was in with probability q, independently (Poisson sampling, neighbours by one record more
    or less).
    """

    mechanism: Mechanism = "gaussian"
    noise_multiplier: Annotated[float, Field(gt=0)]
    sampling_probability: Annotated[float, Field(gt=0, le=1)] = 1.0
    count: Annotated[int, Field(ge=1)] = 1


def epsilon(events: Sequence[NoiseEvent], target_delta: float) -> float:
    """An upper bound on the epsilon of all events under adaptive composition.

    Args:
        events: The releases; without any, epsilon is 0.
        target_delta: In (0, 1).

    Raises:
        GymError: ``CONFIG_INVALID`` for a delta out of range, or noise too small to compute with;
            ``MISSING_DEPENDENCY`` without dp-accounting.
    """
    if not 0 < target_delta < 1:
        raise GymError(ErrorCode.CONFIG_INVALID, f"target_delta is {target_delta}, not between 0 and 1")
    if not events:
        return 0.0
    try:
        return _epsilon(_collected(events), target_delta)
    except (OverflowError, ZeroDivisionError) as error:
        least = min(event.noise_multiplier for event in events)
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"noise_multiplier is {least:g}: this little noise gives no privacy, and no finite epsilon",
            "raise noise_multiplier; 1 is usual",
        ) from error


def accountant_name(events: Sequence[NoiseEvent]) -> str:
    """The accountant that ``epsilon`` uses for these events: ``pld`` or ``rdp``."""
    return "rdp" if any(event.mechanism == "discrete_gaussian" for event in events) else "pld"


def noise_multiplier_for(
    target_epsilon: float, target_delta: float, *, sampling_probability: float = 1.0, count: int = 1
) -> float:
    """The smallest noise multiplier with which ``count`` Gaussian releases stay within the target.

    Raises:
        GymError: ``CONFIG_INVALID`` where no noise multiplier up to 10,000 is enough.
    """
    if target_epsilon <= 0:
        raise GymError(ErrorCode.CONFIG_INVALID, f"target_epsilon is {target_epsilon}, not above 0")

    def cost(noise_multiplier: float) -> float:
        event = NoiseEvent(
            noise_multiplier=noise_multiplier, sampling_probability=sampling_probability, count=count
        )
        return epsilon([event], target_delta)

    low, high = 0.0, 1.0
    while cost(high) > target_epsilon:
        low, high = high, 2 * high
        if high > 1e4:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"epsilon {target_epsilon} at delta {target_delta} cannot be reached in {count} steps",
                "allow a larger epsilon, or fewer steps",
            )
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if cost(middle) <= target_epsilon else (middle, high)
        if high < 1e-3:
            break
    return high


def _collected(events: Sequence[NoiseEvent]) -> tuple[NoiseEvent, ...]:
    """Group equal events; combine unsampled Gaussians into the one that they are equivalent to.

    Releases with multipliers z_i are together, adaptively too, one with multiplier (sum z_i^-2)^(-1/2): Dong, Roth
    and Su 2022, "Gaussian Differential Privacy", corollary 3.3.
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
        for (m, z, q), count in sorted(counts.items())
    ]
    return tuple(collected)


@lru_cache(maxsize=1024)
def _epsilon(events: tuple[NoiseEvent, ...], target_delta: float) -> float:
    dp = _dp_accounting()
    if _is_one_whole_gaussian(events):
        from dp_accounting.gaussian_mechanism import get_epsilon_gaussian

        return float(get_epsilon_gaussian(events[0].noise_multiplier, target_delta)) + _ROOT_ERROR
    if accountant_name(events) == "rdp":
        from dp_accounting.rdp import RdpAccountant

        accountant = RdpAccountant()
    else:
        from dp_accounting.pld import PLDAccountant

        accountant = PLDAccountant(
            value_discretization_interval=max(_GRID, _widest_loss(events) / _MAX_CELLS)
        )
    for event in events:
        dp_event = dp.GaussianDpEvent(event.noise_multiplier)
        if event.sampling_probability < 1.0:
            if event.mechanism == "discrete_gaussian":
                raise GymError(
                    ErrorCode.CONFIG_INVALID,
                    "a discrete Gaussian on a sample of the contributors is not accounted for",
                    "use mechanism: gaussian, or no sampling",
                )
            dp_event = dp.PoissonSampledDpEvent(event.sampling_probability, dp_event)
        accountant.compose(dp_event, event.count)
    return float(accountant.get_epsilon(target_delta))


def _is_one_whole_gaussian(events: tuple[NoiseEvent, ...]) -> bool:
    """True if the closed form holds and stays in the range of floats."""
    kinds = [(event.mechanism, event.sampling_probability) for event in events]
    return kinds == [("gaussian", 1.0)] and _widest_loss(events) <= _GRID * _MAX_CELLS


def _widest_loss(events: Sequence[NoiseEvent]) -> float:
    """Approximate largest privacy loss of one event; a Gaussian's is normal with mean 1/2z^2 and deviation 1/z."""
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
