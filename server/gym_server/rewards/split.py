"""Split a round's credits by score, by contribution to evaluations, and for participation."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.soup.credit import (
    RunningScore,
    Vector,
    certain_gain,
    divided,
    divisors_as_one,
    pay_by_score,
    split_pool,
    whole,
)
from gym_server.rewards.settlements import Settlement, settle

LEAST_WEIGHT = 0.1
"""Minimum participation weight, as a share of the largest weight. Every merged contributor gets some pay, but ten new
accounts together get no more than one account with the highest reputation.
"""


@dataclass(frozen=True)
class MeasuredRound:
    """The scores of a round and the running scores before it.

    Attributes:
        parts: ``[k]`` score by block of held-out rows, by contributor of a merged update.
        luck: Score that a random update may get by chance, by contributor.
        chance: Standard deviation of the score of a random direction of the update's size, by contributor.
        gain: ``[k]`` gain of the round's soup.
        block_weights: ``[k]`` shares of the held-out tokens.
        running_scores: Running scores before the round, by contributor.
        run: Running score of the entire run before the round.
        shared: Credits that earlier rounds paid for participation.
        by_evals: Credits that earlier rounds paid by evaluations.
    """

    parts: Mapping[str, Vector]
    luck: Mapping[str, float]
    chance: Mapping[str, float]
    gain: Vector
    block_weights: Vector
    running_scores: Mapping[str, RunningScore]
    run: RunningScore
    shared: int = 0
    by_evals: int = 0


@dataclass(frozen=True)
class Split:
    """The result of splitting a round's credits.

    Attributes:
        credits: Whole credits by contributor.
        earning: Contributors whose update counts as a positive contribution.
        together: Groups of contributors that were paid as one.
        evals_pool: Credits that were split by evaluations.
        left: Credits that stay in the pool for later rounds.
        running_scores: Running scores after the round, by participating contributor.
        run: Running score of the entire run after the round; None without measurements.
        shared: Credits that all rounds so far have paid for participation.
        by_evals: Credits that all rounds so far have paid by evaluations.
        settlements: Settlements after the round, by contributor.
    """

    credits: dict[str, int]
    earning: frozenset[str]
    together: list[list[str]] = field(default_factory=list)
    evals_pool: int = 0
    left: int = 0
    running_scores: dict[str, RunningScore] = field(default_factory=dict)
    run: RunningScore | None = None
    shared: int = 0
    by_evals: int = 0
    settlements: dict[str, Settlement] = field(default_factory=dict)


def split(
    config: RewardsConfig,
    reputations: Mapping[str, float],
    measured: MeasuredRound | None = None,
    together: Callable[[Collection[str]], list[list[str]]] = lambda _: [],
    duplicates: Mapping[str, Collection[str]] | None = None,
    evals: Mapping[str, float] | None = None,
    carried: int = 0,
    shares: Mapping[str, float] | None = None,
    settlements: Mapping[str, Settlement] | None = None,
    comparable: Collection[str] = (),
) -> Split:
    """Split the pool among the contributors of merged updates and duplicates, each with one update.

    Args:
        config: The rewards config, with the shares of the pool.
        reputations: Reputation before the round, by contributor.
        measured: The scores; None without measurements.
        together: Returns the groups of the given contributors that are paid as one, by the mean of their scores that
            count as work. A group gets one participation share, weighted by its summed reputation and divided equally.
        duplicates: Contributors who sent the same work, by contributor of the merged update, whose pay they share.
        evals: Contribution of each update to the evaluations, by contributor; None if credits do not depend on them.
        carried: Credits that earlier rounds left in the pool because no gain had earned them. A round without
            measurements passes them on unchanged.
        shares: Admitted weight of each merged update of a continuous round, by contributor, which scales participation
            pay.
        settlements: Settlements before the round; None if contributors are never compared.
        comparable: Contributors whose previous update is known, so that the hub can detect shared data. Only they and
            contributors with settled pay are paid by score, including for earlier rounds. A round with one contributor
            pays it at once.
    """
    same_work = duplicates or {}
    others = {who for group in same_work.values() for who in group}
    compared = set(reputations) - others
    helpful = compared if measured is None else _beyond_luck(measured)
    groups = together(compared)
    grouped = {who for group in groups for who in group}
    units = {group[0]: group for group in groups}
    units |= {who: [who] for who in reputations if who not in grouped | others}
    told_apart = compared & set(comparable)

    sharing = {
        name: [*members, *(other for who in members for other in same_work.get(who, ()))]
        for name, members in units.items()
    }
    as_one = [members for members in sharing.values() if len(members) > 1]

    added = {
        name: max(0.0, sum((evals or {}).get(who, 0.0) for who in useful) / max(1, len(useful)))
        for name, members in units.items()
        for useful in [helpful.intersection(members)]
    }
    scored: dict[str, int] = dict.fromkeys(reputations, 0)
    running_scores: dict[str, RunningScore] = {}
    run, paid_by_evals, earning = None, 0, set(reputations)
    pot = config.pool + carried
    if measured is not None:
        before = _as_one(measured.running_scores, as_one, settlements)
        waiting = _new(reputations, settlements) - told_apart if len(reputations) > 1 else set()
        share_of_evals = config.evals_share if config.score_on == "evals" else 0.0
        quality, participation = ((1.0 - share_of_evals) * weight for weight in config.weights)
        scored, running_scores, run = _by_score(
            quality * config.credits_per_nat,
            whole(quality * pot),
            measured,
            before,
            groups,
            helpful,
            same_work,
            waiting,
        )
        for_work = _from_gain(config, participation, measured, run, pot, measured.shared)
        evals_pool = 0
        if any(added.values()):
            evals_pool = _from_gain(config, share_of_evals, measured, run, pot, measured.by_evals)
        paid_by_evals = measured.by_evals + evals_pool
        earning = {who for who in helpful if running_scores[who].is_work}
        earning |= {other for who in earning for other in same_work.get(who, ())}
    else:
        evals_pool = round(config.pool * config.evals_share) if any(added.values()) else 0
        for_work = config.pool - evals_pool

    by_work = split_pool(for_work, _participation(config, reputations, sharing, shares))
    for_work = sum(by_work.values())  # 0 if all weights are 0
    by_evals = split_pool(evals_pool, added)
    credits: dict[str, int] = {}
    for name, members in sharing.items():
        credits |= split_pool(by_work[name] + by_evals[name], dict.fromkeys(members, 1.0))
    settled: dict[str, Settlement] = {}
    if settlements is not None:
        credits, settled = settle(settlements, told_apart, as_one, credits)
    return Split(
        {who: amount + scored[who] for who, amount in credits.items()},
        frozenset(earning),
        groups,
        evals_pool,
        pot - sum(scored.values()) - for_work - evals_pool,
        running_scores,
        run,
        0 if measured is None else measured.shared + for_work,
        paid_by_evals,
        settled,
    )


def _by_score(
    price: float,
    available: int,
    measured: MeasuredRound,
    before: Mapping[str, RunningScore],
    groups: list[list[str]],
    helpful: Collection[str],
    same_work: Mapping[str, Collection[str]],
    waiting: Collection[str],
) -> tuple[dict[str, int], dict[str, RunningScore], RunningScore]:
    """Return credits by score, and the running scores after them. A round that lowered no loss pays nothing.

    ``price`` is in credits per nat, and ``available`` in credits. ``before`` holds the running scores before the round,
    and ``helpful`` the contributors whose score in it exceeds chance. Contributors in ``waiting`` are paid in a later
    round.
    """
    # A known contributor's score also counts in its bad rounds; otherwise many keys could share the mean of their best
    # rounds.
    work = {*helpful, *(who for who, one in before.items() if one.is_work)}
    divisors = divisors_as_one({who: float(one.sum()) for who, one in measured.parts.items()}, groups, work)
    parts = divided(measured.parts, divisors)
    chance = {who: one / divisors[who] for who, one in measured.chance.items()}
    for who, others in same_work.items():
        everyone = [who, *others]
        parts |= dict.fromkeys(everyone, parts[who] / len(everyone))
        chance |= dict.fromkeys(everyone, chance[who] / len(everyone))
    nobody = RunningScore(0.0 * measured.gain)
    running_scores = {who: before.get(who, nobody).with_round(parts[who], chance[who]) for who in parts}
    run = measured.run.with_round(measured.gain)
    paid = dict.fromkeys(parts, 0)
    if measured.gain.sum() > 0.0:
        everybody = {**before, **running_scores}
        present = [who for who in parts if who not in waiting]
        paid |= pay_by_score(everybody, run, measured.block_weights, present, price, available)
    running_scores = {who: replace(one, earned=one.earned + paid[who]) for who, one in running_scores.items()}
    return paid, running_scores, replace(run, earned=run.earned + sum(paid.values()))


def _from_gain(
    config: RewardsConfig, share: float, measured: MeasuredRound, run: RunningScore, pot: int, paid: int
) -> int:
    """Return the credits that a share of the price pays in this round: for the certain gain, less those paid before.

    They do not depend on whose scores are paid in the round. A round that lowered no loss pays nothing.
    """
    if measured.gain.sum() <= 0.0:
        return 0
    earned = whole(share * config.credits_per_nat * certain_gain(run, measured.block_weights))
    return max(0, min(whole(share * pot), earned - paid))


def _new(contributors: Collection[str], settlements: Mapping[str, Settlement] | None) -> set[str]:
    """Return contributors whose provisional pay is not settled yet; empty without settlements."""
    if settlements is None:
        return set()
    return {who for who in contributors if settlements.get(who, Settlement()).provisional is not None}


def _as_one(
    running_scores: Mapping[str, RunningScore],
    groups: list[list[str]],
    settlements: Mapping[str, Settlement] | None,
) -> dict[str, RunningScore]:
    """Return running scores in which the new members of each group count as one contributor.

    If a group has a known member, the positive scores of its new members count as zero.
    """
    scores = {who: one.brought for who, one in running_scores.items()}
    work = {who for who, one in running_scores.items() if one.is_work}
    new = [_new(group, settlements) for group in groups]
    divisors = divisors_as_one(scores, [one & scores.keys() for one in new], work)
    counted = {who for some, group in zip(new, groups, strict=True) if len(some) < len(group) for who in some}
    return {
        who: replace(one, parts=0.0 * one.parts, chance=0.0)
        if who in counted and scores[who] > 0.0
        else replace(one, parts=one.parts / divisors[who], chance=one.chance / divisors[who] ** 2)
        for who, one in running_scores.items()
    }


def _participation(
    config: RewardsConfig,
    reputations: Mapping[str, float],
    units: Mapping[str, Collection[str]],
    shares: Mapping[str, float] | None,
) -> dict[str, float]:
    """Return the units' participation weights; members of a unit share one weight, from their summed reputation.

    In a continuous round a unit's weight is multiplied by the largest admitted weight of its members.
    """
    largest = max(reputations.values(), default=0.0)
    if not config.participation_ramp or largest == 0.0:
        weights = dict.fromkeys(units, 1.0)
    else:
        together = {name: sum(reputations[who] for who in members) for name, members in units.items()}
        weights = {name: min(largest, max(value, LEAST_WEIGHT * largest)) for name, value in together.items()}
    if shares is None:
        return weights
    return {
        name: weight * max(shares.get(who, 0.0) for who in units[name]) for name, weight in weights.items()
    }


def _beyond_luck(measured: MeasuredRound) -> set[str]:
    """Return contributors whose score in this round exceeds chance."""
    scores = {who: float(parts.sum()) for who, parts in measured.parts.items()}
    return {who for who, score in scores.items() if score > max(0.0, measured.luck.get(who, 0.0))}


def certainty(found: Split, block_weights: Vector) -> dict[str, float]:
    """Return the ledger's record of the run's total gain: ``gained``, its ``error`` and the ``certain`` part."""
    if found.run is None:
        return {}
    error = found.run.error(block_weights)
    return {
        "gained": round(found.run.brought, 6),
        **({"error": round(error, 6)} if math.isfinite(error) else {}),
        "certain": round(certain_gain(found.run, block_weights), 6),
    }
