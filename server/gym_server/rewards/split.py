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
        credits: Whole credits by contributor.
        earning: Contributors whose update counts as a positive contribution.
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
    """Split the pool over the contributors of the merged updates, each of whom has one.

    Args:
        config: The shares.
        standings: For each contributor of a merged update the reputation before the round.
        scores: For each what the update gave; None where nothing is measured.
        luck: For each the score up to which it may be chance.
    """
    earning = _earning(config, standings, scores, luck or {})
    quality = round(config.pool * config.weights[0]) if scores is not None else 0
    by_score = split_pool(
        quality, {who: scores[who] if who in earning else 0.0 for who in scores} if scores else {}
    )
    ramp = config.participation_ramp and any(standings[who] > 0.0 for who in earning)
    shares = {who: (standings[who] if ramp else 1.0) if who in earning else 0.0 for who in standings}
    by_work = split_pool(config.pool - quality, shares)
    unpaid = "" if earning else "no update of the round gave anything that could be measured"
    found = {who: by_score.get(who, 0) + by_work.get(who, 0) for who in standings}
    return Split(found, frozenset(earning), unpaid)


def _earning(
    config: RewardsConfig,
    standings: Mapping[str, float],
    scores: Mapping[str, float] | None,
    luck: Mapping[str, float],
) -> set[str]:
    """Who gave something; everybody where nothing is measured."""
    if scores is None:
        return set(standings)
    positive = [score for score in scores.values() if score > 0.0]
    least = config.min_score_ratio * sum(positive) / max(1, len(positive))
    return {who for who, score in scores.items() if score > max(0.0, luck.get(who, 0.0)) and score >= least}
