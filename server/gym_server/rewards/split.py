"""Credits of a committed round: one part of the pool by what was measured, the other for having taken part."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from gym_fed.config.credits import RewardsConfig
from gym_fed.soup.rewards import split_pool


@dataclass(frozen=True)
class Split:
    """Who gets what.

    Attributes:
        credits: Whole credits by contributor.
        earning: Contributors whose update counts as a positive contribution.
        together: Those of them who were paid as one.
        unpaid: Why a part of the pool was not paid out; empty where all of it was.
    """

    credits: dict[str, int]
    earning: frozenset[str]
    unpaid: str = ""
    together: list[list[str]] = field(default_factory=list)


def split(
    config: RewardsConfig,
    standings: Mapping[str, float],
    scores: Mapping[str, float] | None = None,
    luck: Mapping[str, float] | None = None,
    together: Callable[[Collection[str]], list[list[str]]] = lambda _: [],
) -> Split:
    """Split the pool over the contributors of the merged updates, each of whom has one.

    Args:
        config: The shares.
        standings: For each contributor of a merged update the reputation before the round.
        scores: For each what the update gave; None where nothing is measured.
        luck: For each the score up to which it may be chance.
        together: Given those who earn, groups of them that are paid as one: by the mean of their scores, with one part
            for having taken part (by the best standing among them), divided equally.
    """
    earning = _earning(config, standings, scores, luck or {})
    quality = round(config.pool * config.weights[0]) if scores is not None else 0
    ramp = config.participation_ramp and any(standings[who] > 0.0 for who in earning)
    groups = together(earning)
    grouped = {who for group in groups for who in group}
    units = {group[0]: group for group in groups} | {who: [who] for who in standings if who not in grouped}
    values, work = dict.fromkeys(units, 0.0), dict.fromkeys(units, 0.0)
    for name, members in units.items():
        if name in earning:
            values[name] = sum(scores[who] for who in members) / len(members) if scores is not None else 0.0
            work[name] = max(standings[who] for who in members) if ramp else 1.0
    by_score, by_work = split_pool(quality, values), split_pool(config.pool - quality, work)
    found: dict[str, int] = {}
    for name, members in units.items():
        found |= split_pool(by_score[name] + by_work[name], dict.fromkeys(members, 1.0))
    unpaid = "" if earning else "no update of the round gave anything that could be measured"
    return Split(found, frozenset(earning), unpaid, groups)


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
