"""Who may hold how much of a weighted vote."""

from __future__ import annotations

import torch
from torch import Tensor

from gym_fed.errors import ErrorCode, GymError


def refuse_half(weights: Tensor, malicious: int) -> None:
    """Refuse weights with which the ``malicious`` heaviest contributors would hold half of the vote.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    exact = weights.to(torch.float64)
    heaviest = exact.sort(descending=True).values[:malicious].sum()
    if bool(2 * heaviest >= exact.sum()):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"the {malicious} heaviest of {len(weights)} updates hold half of it",
            "lower num_examples_cap, or use weighting: uniform",
        )
