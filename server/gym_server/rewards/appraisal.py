"""Appraise a round before its commit: score its updates, split the credit pool and update reputations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection

from gym_fed.config.hub.server import ServerConfig
from gym_fed.evaluation.loss import RowLosses
from gym_fed.soup.credit import Outcome, RunningScore
from gym_server.rewards.earlier_work import FreeRiderFinding
from gym_server.rewards.free_riders import RoundSimilarity
from gym_server.rewards.reputations import Contribution, RoundContributions, record, reputations_before
from gym_server.rewards.running_scores import (
    BY_EVALS,
    OF_ALL,
    RUN,
    SHARED,
    basis_of,
    carried_over,
    recorded,
    running_scores_on,
    write_running_scores,
)
from gym_server.rewards.scores import DIGITS, RoundScores, score_updates
from gym_server.rewards.settlements import recorded_settlements, settlements_before, write_settlements
from gym_server.rewards.split import MeasuredRound, certainty, split
from gym_server.rounds.hub_model import HubModel
from gym_server.rounds.round_store import PAID_VERDICTS, RoundStore
from gym_server.rounds.soup_record import Judgement
from gym_server.rounds.versions import head_of
from gym_server.state import HubState
from gym_server.store.database import Database
from gym_server.store.objects import ObjectStore


@dataclass(frozen=True)
class Appraisal:
    """The result of an appraisal.

    Attributes:
        judgements: The final judgements, with credits.
        record: Function that writes scores and reputations, for the transaction that commits the round.
    """

    judgements: list[Judgement]
    record: Callable[[Connection, int], None]


def appraise(
    state: HubState,
    config: ServerConfig,
    model: HubModel,
    server_round: int,
    judged: Sequence[tuple[Any, Judgement]],
    findings: Mapping[str, FreeRiderFinding],
    similarity: RoundSimilarity,
    coefficients: Sequence[float] | None,
    weights: Sequence[float] | None,
    losses: tuple[RowLosses, RowLosses] | None,
    should_stop: Callable[[], bool],
    evals: Mapping[str, float] | None = None,
    admitted: Sequence[float] | None = None,
) -> Appraisal:
    """Score the merged updates, split the credit pool and update the reputations.

    Args:
        state: The hub's state.
        config: The hub's config, with the pay terms that the round's task announced.
        model: The model that the updates start from.
        server_round: Number of the round.
        judged: Rows of ``updates`` with their judgements, for every update of the round, ordered by id.
        findings: Findings on free-riders and duplicates, by update.
        similarity: Similarity of the round's updates.
        coefficients: Coefficient of each merged update in the aggregate, if the rule weights whole updates.
        weights: Weights of the merged updates from reputations; None if the recipe sets them.
        losses: Losses of the held-out rows before and after the soup; None if there are no held-out rows.
        should_stop: Returns True if the hub must stop.
        evals: Contribution of each merged update to the evaluations; None if credits do not depend on them.
        admitted: Admitted weight of each merged update of a continuous round, by which its participation pay is
            divided.

    Raises:
        ScoringStopped: If ``should_stop`` returned True.
        GymError: See ``score_updates``.
    """
    rewards = config.rewards
    merged = [(row, judgement) for row, judgement in judged if judgement.verdict == "merged"]
    measured = _measured(config, state.store, model, merged, coefficients, weights, should_stop)
    before = _reputations(config, state.database, state.round_store, [row.contributor for row, _ in judged])
    who = {row.update_id: row.contributor for row, _ in merged}
    update_of = {who: update for update, who in who.items()}
    paid = {row.update_id: row.contributor for row, one in judged if one.verdict in PAID_VERDICTS}
    same_work: dict[str, list[str]] = {}
    for row, judgement in judged:
        if judgement.verdict == "duplicate":
            same_work.setdefault(paid[findings[row.update_id].leader], []).append(row.contributor)

    def together(compared: Collection[str]) -> list[list[str]]:
        groups = [[finding.leader, update] for update, finding in findings.items() if finding.leader in who]
        groups = [group for group in groups if group[1] in who]  # merged only because the rule needed them
        if rewards.together_threshold is not None:
            counted_once = [update_of[one] for one in compared]
            groups += similarity.together(counted_once, rewards.together_threshold)
        return [[who[update] for update in group] for group in joined(groups)]

    compares = rewards.together_threshold is not None
    shares = None if admitted is None else dict(zip(who.values(), admitted, strict=True))
    scored, basis = None, basis_of(model.heldout, rewards)
    with state.database.reading() as tx:
        carried = carried_over(tx)
        settled = settlements_before(tx, paid.values()) if compares else None
        if rewards.measures and losses is not None:
            scored = _measured_round(tx, state.round_store, basis, measured, who, losses)
    found = split(
        rewards,
        {name: before[name] for name in paid.values()},
        scored,
        together,
        same_work,
        {who[u]: score for u, score in evals.items()} if evals is not None else None,
        carried,
        shares,
        settled,
        {who[update] for update in similarity.comparable & who.keys()},
    )
    measurement = dict(measured.measurement)
    running_scores = dict(found.running_scores)
    if found.run is not None:
        nothing = 0.0 * found.run.parts
        running_scores[RUN] = found.run
        running_scores[SHARED] = RunningScore(nothing, earned=found.shared)
        running_scores[BY_EVALS] = RunningScore(nothing, earned=found.by_evals)
    if scored is not None:
        measurement["gain"] = certainty(found, scored.block_weights)
        measurement["heldout"], measurement["basis"] = model.heldout, basis
        measurement["without_gain"] = sorted(
            who for who, parts in scored.parts.items() if round(float(parts.sum()), DIGITS) <= 0.0
        )
        measurement["running_scores"] = recorded(running_scores, scored.block_weights)
    if found.settlements:
        measurement["settlements"] = recorded_settlements(found.settlements)
    if evals is not None:
        measurement["evals"] = {"share": rewards.evals_share, "pool": found.evals_pool, "scores": dict(evals)}
    sharing = {one: len(group) for group in found.together for one in group}
    for leader, others in same_work.items():
        sharing |= dict.fromkeys([leader, *others], sharing.get(leader, 1) * (1 + len(others)))
    contributions = [
        Contribution(
            row.update_id,
            row.contributor,
            _outcome(judgement, findings.get(row.update_id), row.contributor in found.earning),
            before[row.contributor],
            measured.scores.get(row.update_id),
            measured.errors.get(row.update_id),
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
        account = RoundContributions(height, contributions, measurement, clusters, groups, found.left)
        record(tx, state.ledger, server_round, account, rewards.reputation)
        write_running_scores(tx, basis, height, running_scores)
        write_settlements(tx, found.settlements)

    judgements = [
        replace(
            j,
            credit=found.credits.get(j.contributor, 0) if j.verdict in PAID_VERDICTS else 0,
            score=measured.scores.get(j.update_id),
            error=measured.errors.get(j.update_id),
        )
        for _, j in judged
    ]
    return Appraisal(judgements, write)


def joined(groups: Sequence[Collection[str]]) -> list[list[str]]:
    """Merge groups that share a member."""
    found: list[set[str]] = []
    for group in groups:
        touching = [one for one in found if not one.isdisjoint(group)]
        found = [one for one in found if one not in touching] + [set(group).union(*touching)]
    return [sorted(group) for group in found]


def reputation_weights(
    config: ServerConfig, database: Database, round_store: RoundStore, contributors: Sequence[str]
) -> list[float] | None:
    """Return weights of updates from their contributors' reputations; None if the recipe does not use them."""
    floor = config.soup.reputation_floor
    if floor is None:
        return None
    found = _reputations(config, database, round_store, contributors)
    return [max(floor, found[who]) for who in contributors]


def _reputations(
    config: ServerConfig, database: Database, round_store: RoundStore, contributors: Sequence[str]
) -> dict[str, float]:
    height = round_store.newest_height() + 1
    with database.reading() as tx:
        return reputations_before(tx, contributors, height, config.rewards.reputation)


def _measured(
    config: ServerConfig,
    store: ObjectStore,
    model: HubModel,
    merged: Sequence[tuple[Any, Judgement]],
    coefficients: Sequence[float] | None,
    weights: Sequence[float] | None,
    should_stop: Callable[[], bool],
) -> RoundScores:
    rewards = config.rewards
    if not rewards.measures:
        return RoundScores({}, measurement={"method": rewards.score})
    return score_updates(
        store,
        model,
        [row for row, _ in merged],
        coefficients,
        weights,
        should_stop,
        recipe=config.soup,
        method=rewards.score,
        options=rewards.score_options,
    )


def _measured_round(
    tx: Connection,
    round_store: RoundStore,
    basis: str,
    measured: RoundScores,
    who: Mapping[str, str],
    losses: tuple[RowLosses, RowLosses],
) -> MeasuredRound:
    """Return the scores by contributor, with the running scores before the round."""
    before, after = losses
    gain = before.gain_to(after)
    nothing = 0.0 * gain
    head = head_of(tx, round_store.base_digest)
    running_scores = running_scores_on(tx, basis, head.height, nothing)
    run, shared, by_evals = map(running_scores.pop, OF_ALL)
    return MeasuredRound(
        {contributor: measured.parts.get(update, nothing) for update, contributor in who.items()},
        {contributor: measured.luck.get(update, 0.0) for update, contributor in who.items()},
        {contributor: measured.chance.get(update, 0.0) for update, contributor in who.items()},
        gain,
        before.block_weights,
        running_scores,
        run,
        shared.earned,
        by_evals.earned,
    )


def _outcome(judgement: Judgement, finding: FreeRiderFinding | None, earning: bool) -> Outcome:
    if judgement.verdict in PAID_VERDICTS:
        return Outcome.POSITIVE if earning else Outcome.NOTHING
    if finding is not None and finding.blameless:
        return Outcome.NOTHING
    return Outcome.CHEATING if judgement.cheating else Outcome.REJECTED
