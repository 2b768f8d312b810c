"""Measured rounds whose held-out rows all say the same, so that nothing about them is in doubt."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from gym_server.rewards.split import MeasuredRound

from gym_fed.soup.credit import RunningScore, Vector

BLOCKS = 100


def even(value: float) -> Vector:
    """A gain that every block of rows adds the same to."""
    return np.full(BLOCKS, value / BLOCKS)


def measured_round(
    scores: Mapping[str, float],
    gain: float | None = None,
    chance: float = 0.0,
    running_scores: Mapping[str, RunningScore] | None = None,
    run: RunningScore | None = None,
    shared: int = 0,
    by_evals: int = 0,
) -> MeasuredRound:
    """A round with these scores; its gain is their sum unless given, and ``chance`` the same for everybody."""
    return MeasuredRound(
        {who: even(score) for who, score in scores.items()},
        dict.fromkeys(scores, 2 * chance),
        dict.fromkeys(scores, chance),
        even(sum(scores.values()) if gain is None else gain),
        even(1.0),
        running_scores or {},
        run or RunningScore(even(0.0)),
        shared,
        by_evals,
    )
