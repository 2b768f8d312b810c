"""Which tensors fit a byte budget for the whole file: those that keep the most energy.

A kind of top-k sparsification with whole tensors as the unit (Stich et al. 2018, "Sparsified SGD with
Memory"): what is left out stays in the residual, where it grows until its turn comes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gym_fed.delta.base import BaseSpec
from gym_fed.delta.layout import Layout, header_bytes
from gym_fed.delta.manifest import Manifest
from gym_fed.delta.policy import Choice
from gym_fed.errors import ErrorCode, GymError

_SPARED = 8
"""How many of those that would be left out first are kept on trial, one more at each."""


def fit_budget(
    choices: Sequence[Choice],
    energy: Mapping[str, float],
    spec: BaseSpec,
    extra: Mapping[str, str],
    budget: int,
) -> list[Choice]:
    """The choices to write so that the file is at most ``budget`` bytes long.

    Those with the least energy per payload byte are left out first; then, from the best of them down, each
    that still fits into the gap comes back. That alone would leave out a large tensor, an embedding, where the budget
    lacks a few bytes: so it is tried again with the first of those kept, then with the first two, and so on, and
    what keeps the most energy is taken. Ties are settled by name, and by the fewest on trial.

    Raises:
        GymError: ``CONFIG_INVALID`` when not one tensor fits.
    """
    ranked = sorted(choices, key=lambda c: (-energy[c.record.name] / max(1, c.payload_bytes), c.record.name))
    if file_bytes(ranked, spec, extra) <= budget:
        return ranked
    best: list[Choice] = []
    for spared in range(min(_SPARED, len(ranked))):
        at = len(ranked) - spared
        kept = _first_that_fit([*ranked[at:], *ranked[:at]], spec, extra, budget)
        if _sum(kept, energy) > _sum(best, energy):
            best = kept
    if not best:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"max_bits_per_weight allows {budget} bytes, in which not one tensor of {spec.model_name!r} fits",
            "raise max_bits_per_weight",
        )
    return best


def _first_that_fit(
    ranked: Sequence[Choice], spec: BaseSpec, extra: Mapping[str, str], budget: int
) -> list[Choice]:
    """As many from the front as fit, and of the others each that fits into the gap."""
    low, high = 0, len(ranked)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if file_bytes(ranked[:middle], spec, extra) <= budget else (low, middle)
    kept = list(ranked[:low])
    size = file_bytes(kept, spec, extra)
    for candidate in ranked[low:]:
        if size + candidate.payload_bytes <= budget:
            grown = file_bytes([*kept, candidate], spec, extra)
            if grown <= budget:
                kept.append(candidate)
                size = grown
    return kept


def _sum(choices: Sequence[Choice], energy: Mapping[str, float]) -> float:
    return math.fsum(energy[choice.record.name] for choice in choices)


def require_budget(
    choices: Sequence[Choice], spec: BaseSpec, extra: Mapping[str, str], max_bits_per_weight: float
) -> None:
    """Refuse choices of which none may be left out when their file is over the budget.

    Raises:
        GymError: ``CONFIG_INVALID`` with both sizes.
    """
    budget = math.floor(spec.num_parameters * max_bits_per_weight / 8)
    size = file_bytes(choices, spec, extra)
    if size > budget:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"the factors take {size} bytes, but max_bits_per_weight allows {budget} for {spec.model_name!r}",
            "raise max_bits_per_weight, lower factor_bits (with factors: auto), or train a smaller rank",
        )


def file_bytes(choices: Sequence[Choice], spec: BaseSpec, extra: Mapping[str, str]) -> int:
    """Exact size of the file that these choices make."""
    manifest = Manifest.of(spec.model_name, spec.digest, [c.record for c in choices], extra)
    layout = Layout.of(manifest.tensors)
    return len(header_bytes(manifest, layout)) + layout.data_bytes
