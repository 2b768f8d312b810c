"""Appraise a round before its commit: score its updates, split the pool of credits, update reputations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from sqlalchemy import Connection

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.kinds import CONTRIBUTIONS
from gym_fed.soup.contribution import GRADIENT_COST
from gym_fed.soup.credit.reputation import Outcome
from gym_fed.soup.credit.rewards import split_pool
from gym_server.federation import Federation
from gym_server.rewards.free_riders import FreeRiderFinding, RoundSimilarity
from gym_server.rewards.reputations import Contribution, RoundContributions, record, reputations_before
from gym_server.rewards.scores import DIGITS, RoundScores, luck_of_improvement, score_updates
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.round_store import Judgement


@dataclass(frozen=True)
class Appraisal:
    """What a round comes to.

    Attributes:
        judgements: The final ones, with credits.
        record: Writes scores and reputations; for the transaction that commits the round.
    """

    judgements: list[Judgement]
    record: Callable[[Connection, int], None]


def appraise(
    fed: Federation,
    model: HubModel,
    server_round: int,
    judged: Sequence[tuple[Any, Judgement]],
    findings: Mapping[str, FreeRiderFinding],
    similarity: RoundSimilarity,
    coefficients: Sequence[float] | None,
    weights: Sequence[float] | None,
    should_stop: Callable[[], bool],
    evals: Mapping[str, float] | None = None,
) -> Appraisal:
    """Score what was merged, split the pool, and move the reputations.

    Args:
        fed: The federation.
        model: The model that the updates were made for.
        server_round: The round.
        judged: A row of ``updates`` and its judgement, for every update of the round, by id.
        findings: Of the free-riders among them.
        similarity: How alike they are.
        coefficients: What each merged update counts for in the aggregate, where the rule weighs whole updates.
        weights: Of the merged updates, where reputations make them.
        should_stop: Whether the hub is to stop.
        evals: What each merged update adds to the evaluations; None where credits do not rest on them.

    Raises:
        ScoringStopped: When it is.
        GymError: As ``score_updates``.
    """
    config = fed.config.rewards
    merged = [(row, judgement) for row, judgement in judged if judgement.verdict == "merged"]
    measured = _measured(fed, model, merged, coefficients, weights, should_stop)
    before = _reputations(fed, [row.contributor for row, _ in judged])
    who = {row.update_id: row.contributor for row, _ in merged}
    update_of = {who: update for update, who in who.items()}

    def together(earning: Collection[str]) -> list[list[str]]:
        if config.together_threshold is None:
            return []
        earners = [update_of[one] for one in earning]
        groups = similarity.together(earners, config.together_threshold, config.measures)
        return [[who[update] for update in group] for group in groups]

    found = split(
        config,
        {name: before[name] for name in who.values()},
        {who[u]: score for u, score in measured.scores.items()} if config.measures else None,
        {who[u]: luck for u, luck in measured.luck.items()},
        together,
        {who[u]: score for u, score in evals.items()} if evals is not None else None,
    )
    measurement = dict(measured.measurement)
    if evals is not None:
        measurement["evals"] = {"share": config.evals_share, "pool": found.evals_pool, "scores": dict(evals)}
    sharing = {one: len(group) for group in found.together for one in group}
    contributions = [
        Contribution(
            row.update_id,
            row.contributor,
            _outcome(judgement, findings.get(row.update_id), row.contributor in found.earning),
            before[row.contributor],
            measured.scores.get(row.update_id),
            similarity.nearest.get(row.update_id),
            1.0 / sharing.get(row.contributor, 1),
        )
        for row, judgement in judged
    ]
    clusters: dict[str, list[str]] = {}
    for update, finding in findings.items():
        if finding.leader:
            clusters.setdefault(finding.leader, []).append(update)

    def write(tx: Connection, height: int) -> None:
        groups = [[update_of[one] for one in group] for group in found.together]
        account = RoundContributions(height, contributions, measurement, clusters, groups, found.unpaid)
        record(tx, fed.ledger, server_round, account, config.reputation)

    judgements = [
        replace(j, credit=found.credits[j.contributor] if j.verdict == "merged" else 0) for _, j in judged
    ]
    return Appraisal(judgements, write)


def reputation_weights(fed: Federation, contributors: Sequence[str]) -> list[float] | None:
    """Weights of updates by their contributors' reputations; None where the recipe does not use them."""
    floor = fed.config.soup.reputation_floor
    if floor is None:
        return None
    found = _reputations(fed, contributors)
    return [max(floor, found[who]) for who in contributors]


def _reputations(fed: Federation, contributors: Sequence[str]) -> dict[str, float]:
    height = fed.round_store.newest_height() + 1
    with fed.database.reading() as tx:
        return reputations_before(tx, contributors, height, fed.config.rewards.reputation)


def _measured(
    fed: Federation,
    model: HubModel,
    merged: Sequence[tuple[Any, Judgement]],
    coefficients: Sequence[float] | None,
    weights: Sequence[float] | None,
    should_stop: Callable[[], bool],
) -> RoundScores:
    config = fed.config.rewards
    if not config.measures:
        return RoundScores({}, measurement={"method": config.score})
    if CONTRIBUTIONS.type_of(config.score).from_screens:
        scores = {row.update_id: round(-(j.heldout_change or 0.0), DIGITS) for row, j in merged}
        share = fed.config.soup.server_learning_rate / max(1, len(merged))
        luck = luck_of_improvement(fed, model, [row for row, _ in merged], share)
        return RoundScores(
            scores, luck, measurement={"method": config.score, "evaluations": len(merged) + 1 + GRADIENT_COST}
        )
    return score_updates(
        fed,
        model,
        [row for row, _ in merged],
        coefficients,
        weights,
        should_stop,
        recipe=fed.config.soup,
        method=config.score,
        options=config.score_options,
    )


def _outcome(judgement: Judgement, finding: FreeRiderFinding | None, earning: bool) -> Outcome:
    if judgement.verdict == "merged":
        return Outcome.POSITIVE if earning else Outcome.NOTHING
    if finding is not None and finding.blameless:
        return Outcome.NOTHING
    return Outcome.CHEATING if judgement.cheating else Outcome.REJECTED


@dataclass(frozen=True)
class Split:
    """Who gets what.

    Attributes:
        credits: Whole credits by contributor.
        earning: Contributors whose update counts as a positive contribution.
        unpaid: Why a part of the pool was not paid out; empty where all of it was.
        together: Those of them who were paid as one.
        evals_pool: Credits that were split by evaluations.
    """

    credits: dict[str, int]
    earning: frozenset[str]
    unpaid: str = ""
    together: list[list[str]] = field(default_factory=list)
    evals_pool: int = 0


def split(
    config: RewardsConfig,
    reputations: Mapping[str, float],
    scores: Mapping[str, float] | None = None,
    luck: Mapping[str, float] | None = None,
    together: Callable[[Collection[str]], list[list[str]]] = lambda _: [],
    evals: Mapping[str, float] | None = None,
) -> Split:
    """Split the pool over the contributors of the merged updates, each of whom has one.

    Args:
        config: The shares.
        reputations: For each contributor of a merged update the reputation before the round.
        scores: For each what the update gave; None where nothing is measured.
        luck: For each the score up to which it may be chance.
        together: Given those who earn, groups of them that are paid as one: by the mean of their scores, with one part
            for having taken part (by the best reputation among them), divided equally.
        evals: For each what the update adds to the evaluations; None where credits do not rest on them.
    """
    earning = _earning(config, reputations, scores, luck or {})
    ramp = config.participation_ramp and any(reputations[who] > 0.0 for who in earning)
    groups = together(earning)
    grouped = {who for group in groups for who in group}
    units = {group[0]: group for group in groups} | {who: [who] for who in reputations if who not in grouped}
    values, work, added = (dict.fromkeys(units, 0.0) for _ in range(3))
    for name, members in units.items():
        if name in earning:
            values[name] = sum(scores[who] for who in members) / len(members) if scores is not None else 0.0
            work[name] = max(reputations[who] for who in members) if ramp else 1.0
            if evals is not None:
                added[name] = max(0.0, sum(evals.get(who, 0.0) for who in members) / len(members))
    evals_pool = round(config.pool * config.evals_share) if any(added.values()) else 0
    rest = config.pool - evals_pool
    quality = round(rest * config.weights[0]) if scores is not None else 0
    by_score, by_work = split_pool(quality, values), split_pool(rest - quality, work)
    by_evals = split_pool(evals_pool, added)
    found: dict[str, int] = {}
    for name, members in units.items():
        found |= split_pool(by_score[name] + by_work[name] + by_evals[name], dict.fromkeys(members, 1.0))
    unpaid = "" if earning else "no update of the round gave anything that could be measured"
    return Split(found, frozenset(earning), unpaid, groups, evals_pool)


def _earning(
    config: RewardsConfig,
    reputations: Mapping[str, float],
    scores: Mapping[str, float] | None,
    luck: Mapping[str, float],
) -> set[str]:
    """Who gave something; everybody where nothing is measured."""
    if scores is None:
        return set(reputations)
    positive = [score for score in scores.values() if score > 0.0]
    least = config.min_score_ratio * sum(positive) / max(1, len(positive))
    return {who for who, score in scores.items() if score > max(0.0, luck.get(who, 0.0)) and score >= least}
