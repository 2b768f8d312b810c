"""Scores and reputations, which are written in the transaction that commits a round.

``rewards_of`` returns the content of ``AccountReply.rewards_json``, newest round first::

    {"reputation": 0.488, "owed": 0, "is_new": false, "rounds": [{"server_round": 3, "update": "ab12...",
      "verdict": "merged", "reason": "", "method": "estimate", "score": 0.0123, "error": 0.002, "similarity": 0.41,
      "credit": 250, "reputation": 0.488}]}

``owed`` is what will be withheld from later pay, in credits (``settlements``). While a contributor ``is_new``, its
scores are not paid yet. ``score``, its standard ``error`` and ``similarity`` are null if they were not measured;
``method`` and ``reputation`` (after the round) are also null for an update of a round without a version.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, func, select

from gym_fed.config.hub.credits import ReputationConfig, RewardsConfig
from gym_fed.soup.credit import NEW, Outcome, Reputation, after, before
from gym_server.ledger.chain import Ledger
from gym_server.rewards.settlements import Settlement, settlements_before
from gym_server.rounds.round_store import PAID_VERDICTS
from gym_server.store.tables import contributions, credits, reputations, running_scores, updates, versions

_MAX_ROUNDS = 100


@dataclass(frozen=True)
class Contribution:
    """The result of one update in a committed round."""

    update_id: str
    contributor: str
    outcome: Outcome
    reputation_before: float
    """The contributor's reputation before the round."""
    score: float | None = None
    error: float | None = None
    """The standard error of the score."""
    similarity: float | None = None
    share: float = 1.0
    """The update's share of the reputation increase of a positive round, which updates paid as one share."""


@dataclass(frozen=True)
class RoundContributions:
    """A round's contributions and how they were measured.

    Attributes:
        height: Height of the version that the round created.
        method: Scoring method and its results: ``method``, ``options``, ``evaluations``, ``stopped``.
        clusters: Copies of an update, by the id of that update.
        together: Groups of updates that were paid as one.
        left: Credits that stay in the pool for later rounds.
    """

    height: int
    contributions: list[Contribution]
    method: dict[str, Any]
    clusters: Mapping[str, list[str]] = field(default_factory=dict)
    together: list[list[str]] = field(default_factory=list)
    left: int = 0


def reputations_before(
    tx: Connection, contributors: Iterable[str], height: int, config: ReputationConfig
) -> dict[str, float]:
    """Return contributors' reputations before the round that creates version ``height``."""
    wanted = set(contributors)
    rows = tx.execute(select(reputations).where(reputations.c.contributor.in_(wanted))).all()
    known = {row.contributor: Reputation(row.value, row.height) for row in rows}
    return {who: before(known.get(who, NEW), height, config.absence) for who in wanted}


def record(
    tx: Connection, ledger: Ledger, server_round: int, account: RoundContributions, config: ReputationConfig
) -> None:
    """Write a round's scores and reputations, and record them in a ledger entry of kind ``contribution``."""
    moved = {
        c.contributor: after(
            c.reputation_before, c.outcome, c.share * config.up, config.rejected, config.cheating
        )
        for c in account.contributions
    }
    for one in account.contributions:
        tx.execute(
            contributions.insert().values(
                update_id=one.update_id,
                contributor=one.contributor,
                server_round=server_round,
                method=account.method["method"],
                score=one.score,
                error=one.error,
                similarity=one.similarity,
                reputation=moved[one.contributor],
            )
        )
    tx.execute(reputations.delete().where(reputations.c.contributor.in_(moved)))
    for who, value in moved.items():
        tx.execute(reputations.insert().values(contributor=who, value=value, height=account.height))
    ledger.append(
        tx,
        "contribution",
        {
            "server_round": server_round,
            "height": account.height,
            **account.method,
            "scores": {c.update_id: c.score for c in account.contributions},
            "errors": {c.update_id: c.error for c in account.contributions if c.error is not None},
            "similarity": {
                c.update_id: c.similarity for c in account.contributions if c.similarity is not None
            },
            "clusters": dict(account.clusters),
            "together": account.together,
            "reputations": moved,
            "left": account.left,
        },
    )


def rewards_of(tx: Connection, contributor: str, config: RewardsConfig) -> dict[str, Any]:
    """Return a contributor's reputation and updates, in the format shown in the module's docstring."""
    next_height = int(tx.scalar(select(func.max(versions.c.height))) or 0) + 1
    rows = (
        tx.execute(
            select(
                updates.c.server_round,
                updates.c.update_id.label("update"),
                updates.c.verdict,
                updates.c.reason,
                contributions.c.method,
                contributions.c.score,
                contributions.c.error,
                contributions.c.similarity,
                func.coalesce(credits.c.amount, 0).label("credit"),
                contributions.c.reputation,
            )
            .outerjoin(contributions, contributions.c.update_id == updates.c.update_id)
            .outerjoin(
                credits,
                (credits.c.server_round == updates.c.server_round)
                & (credits.c.contributor == updates.c.contributor)
                & updates.c.verdict.in_(PAID_VERDICTS),
            )
            .where(updates.c.contributor == contributor)
            .order_by(updates.c.received_at.desc())
            .limit(_MAX_ROUNDS)
        )
        .mappings()
        .all()
    )
    settled = settlements_before(tx, [contributor]).get(contributor, Settlement(None))
    by_score = select(func.max(running_scores.c.earned)).where(running_scores.c.contributor == contributor)
    was_paid = bool(tx.scalar(by_score))  # a round with one contributor pays at once
    return {
        "reputation": reputations_before(tx, [contributor], next_height, config.reputation)[contributor],
        "owed": settled.owed,
        "is_new": settled.provisional is not None and config.together_threshold is not None and not was_paid,
        "rounds": [dict(row) for row in rows],
    }
