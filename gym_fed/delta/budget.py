"""Which tensors fit a byte budget for the whole file: those with the most energy per byte.

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


def fit_budget(
    choices: Sequence[Choice],
    energy: Mapping[str, float],
    spec: BaseSpec,
    extra: Mapping[str, str],
    budget: int,
) -> list[Choice]:
    """The choices to write so that the file is at most ``budget`` bytes long.

    Those with the least energy per payload byte are left out first; then, from the best of them down, each
    that still fits into the gap comes back. Ties are settled by name.

    Raises:
        GymError: ``CONFIG_INVALID`` when not one tensor fits.
    """
    ranked = sorted(choices, key=lambda c: (-energy[c.record.name] / max(1, c.payload_bytes), c.record.name))
    if file_bytes(ranked, spec, extra) <= budget:
        return ranked
    low, high = 0, len(ranked)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if file_bytes(ranked[:middle], spec, extra) <= budget else (low, middle)
    kept = ranked[:low]
    size = file_bytes(kept, spec, extra)
    for candidate in ranked[low:]:
        if size + candidate.payload_bytes <= budget:
            grown = file_bytes([*kept, candidate], spec, extra)
            if grown <= budget:
                kept.append(candidate)
                size = grown
    if not kept:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"max_bits_per_weight allows {budget} bytes, in which not one tensor of {spec.model_name!r} fits",
            "raise max_bits_per_weight",
        )
    return kept


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
