"""Credits of a committed round: one part of the pool by what was measured, the other for having taken part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gym_fed.config.credits import RewardsConfig
from gym_fed.soup.rewards import split_pool


@dataclass(frozen=True)
class Split:
    """Who gets what.

    Attributes:
        credits: Whole credits by update.
        earning: Updates that count as a positive contribution.
        unpaid: Why a part of the pool was not paid out; empty where all of it was.
    """

    credits: dict[str, int]
    earning: frozenset[str]
    unpaid: str = ""


def split(
    config: RewardsConfig,
    standings: Mapping[str, float],
    scores: Mapping[str, float] | None = None,
    luck: Mapping[str, float] | None = None,
) -> Split:
    """Split the pool over the merged updates.

    Args:
        config: The shares.
        standings: For each merged update its contributor's reputation before the round.
        scores: For each what it gave; None where nothing is measured.
        luck: For each the score up to which it may be chance.
    """
    earning = _earning(config, standings, scores, luck or {})
    quality = round(config.pool * config.weights[0]) if scores is not None else 0
    by_score = split_pool(quality, {u: scores[u] if u in earning else 0.0 for u in scores} if scores else {})
    ramp = config.participation_ramp and any(standings[u] > 0.0 for u in earning)
    shares = {u: (standings[u] if ramp else 1.0) if u in earning else 0.0 for u in standings}
    by_work = split_pool(config.pool - quality, shares)
    unpaid = "" if earning else "no update of the round gave anything that could be measured"
    found = {u: by_score.get(u, 0) + by_work.get(u, 0) for u in standings}
    return Split(found, frozenset(earning), unpaid)


def _earning(
    config: RewardsConfig,
    standings: Mapping[str, float],
    scores: Mapping[str, float] | None,
    luck: Mapping[str, float],
) -> set[str]:
    """Updates that gave something; all of them where nothing is measured."""
    if scores is None:
        return set(standings)
    positive = [score for score in scores.values() if score > 0.0]
    least = config.min_score_ratio * sum(positive) / max(1, len(positive))
    return {u for u, score in scores.items() if score > max(0.0, luck.get(u, 0.0)) and score >= least}
