"""Store running scores: the total score of each contributor and of the entire run on the current held-out rows.

Each set of held-out rows and prices has its own running scores, which start at zero. Every version adds a row for each
of its contributors, so that a rollback discards the scores of abandoned versions. Credits paid for these scores remain
paid.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from sqlalchemy import Connection, func, select

from gym_fed.config.hub.credits import RewardsConfig
from gym_fed.core.json_files import canonical_digest
from gym_fed.soup.credit import RunningScore, Vector
from gym_server.ledger.rows import newest_entry
from gym_server.rounds.versions import heights_to
from gym_server.store.tables import running_scores, versions

RUN = ""
"""Contributor name in the row of the entire run."""
SHARED, BY_EVALS = "*", "*evals"
"""Contributor names in the rows of all pay for participation and by evaluations; only ``earned`` is used."""
OF_ALL = (RUN, SHARED, BY_EVALS)

_DIGITS = 12
"""Decimal places of stored parts (in nats), many more than for scores, so that rounding errors do not accumulate."""


def running_scores_on(tx: Connection, basis: str, height: int, nothing: Vector) -> dict[str, RunningScore]:
    """Read the running scores of all contributors, and of ``OF_ALL``.

    Args:
        tx: A transaction.
        basis: See ``basis_of``.
        height: Height of the version as of which scores are read. Scores of versions that are not its ancestors are
            skipped.
        nothing: ``[k]`` zeros, used for contributors whose rounds were all abandoned.

    Returns:
        The scores. ``earned`` of a contributor includes abandoned rounds, so that nobody is paid twice by score. That
        of ``OF_ALL`` does not: making up for an abandoned gain is paid, by score only to others.
    """
    table, newest = running_scores, func.max(running_scores.c.height)
    abandoned = set(tx.scalars(select(versions.c.height))) - heights_to(tx, height)
    mine = table.c.heldout == basis
    paid = select(table.c.contributor, func.max(table.c.earned)).where(mine).group_by(table.c.contributor)
    found = {who: RunningScore(nothing, 0.0, earned) for who, earned in tx.execute(paid)}
    kept = select(table.c.contributor, newest.label("height"))
    last = kept.where(mine, table.c.height.not_in(abandoned)).group_by(table.c.contributor).subquery()
    same = (table.c.contributor == last.c.contributor) & (table.c.height == last.c.height)
    found |= {who: RunningScore(nothing) for who in OF_ALL}
    for row in tx.execute(select(table).join(last, same).where(mine)):
        earned = row.earned if row.contributor in OF_ALL else found[row.contributor].earned
        found[row.contributor] = RunningScore(np.array(json.loads(row.parts)), row.chance, earned)
    return found


def basis_of(heldout: str, rewards: RewardsConfig) -> str:
    """Return the digest of what running scores depend on: the held-out rows and the prices.

    A change of either starts new scores, so that a change of terms never prices an earlier gain again.
    """
    weights = [*rewards.weights, rewards.evals_share if rewards.score_on == "evals" else 0.0]
    return canonical_digest(
        {"heldout": heldout, "credits_per_nat": rewards.credits_per_nat, "weights": weights}
    )


def write_running_scores(tx: Connection, basis: str, height: int, found: Mapping[str, RunningScore]) -> None:
    """Write the running scores as of a version."""
    for who, one in found.items():
        tx.execute(
            running_scores.insert().values(
                contributor=who,
                heldout=basis,
                height=height,
                parts=_text(one.parts),
                chance=one.chance,
                earned=one.earned,
            )
        )


def recorded(found: Mapping[str, RunningScore], block_weights: Vector) -> dict[str, dict[str, Any]]:
    """Return the ledger's record of running scores: nats, their error, credits, and a digest of the row."""
    lines = {}
    for who, one in found.items():
        error = one.error(block_weights)
        lines[who] = {
            "brought": round(one.brought, 6),
            "error": round(error, 6) if math.isfinite(error) else None,
            "earned": one.earned,
            "digest": row_digest(_text(one.parts), one.chance),
        }
    return lines


def row_digest(parts: str, chance: float) -> str:
    """Return the digest of a running score's parts and chance, as stored in the table."""
    return hashlib.sha256(f"{parts} {chance.hex()}".encode()).hexdigest()[:16]


def carried_over(tx: Connection) -> int:
    """Return the credits that the last round left in the pool."""
    row = newest_entry(tx, "contribution")
    return 0 if row is None else int(json.loads(row.body).get("left", 0))


def _text(parts: Vector) -> str:
    return json.dumps([round(float(value), _DIGITS) for value in parts])
