"""Running scores as they are kept: what each contributor, and the run, brought on the current held-out rows.

Other held-out rows are another measure, so there is a set of running scores for each set of rows, which begins at
nothing. Credits that were earned stay.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from sqlalchemy import Connection, select

from gym_fed.soup.credit.certainty import Vector
from gym_fed.soup.credit.running_score import RunningScore
from gym_server.ledger.rows import newest_entry
from gym_server.store.tables import running_scores

RUN = ""
"""In the place of a contributor: all rounds together."""

_DIGITS = 12
"""To which parts are rounded, in nats: far below the digits of scores, so that sums over rounds lose nothing."""


def running_scores_on(tx: Connection, heldout: str) -> dict[str, RunningScore]:
    """The running scores of everybody, and of the run under ``RUN``, on these held-out rows."""
    rows = tx.execute(select(running_scores).where(running_scores.c.heldout == heldout)).all()
    return {
        row.contributor: RunningScore(np.array(json.loads(row.parts)), row.chance, row.earned) for row in rows
    }


def keep(tx: Connection, heldout: str, found: Mapping[str, RunningScore]) -> None:
    """Put running scores in the place of those before the round."""
    mine = running_scores.c.heldout == heldout
    tx.execute(running_scores.delete().where(mine, running_scores.c.contributor.in_(found)))
    for who, one in found.items():
        tx.execute(
            running_scores.insert().values(
                contributor=who,
                heldout=heldout,
                parts=_text(one.parts),
                chance=one.chance,
                earned=one.earned,
            )
        )


def recorded(found: Mapping[str, RunningScore], block_weights: Vector) -> dict[str, dict[str, Any]]:
    """What the ledger records of running scores: nats, their error, credits, and a digest of the row."""
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
    """The digest of a running score's parts and chance, as the table holds them."""
    return hashlib.sha256(f"{parts} {chance.hex()}".encode()).hexdigest()[:16]


def carried_over(tx: Connection) -> int:
    """Credits that the last round left in the pool."""
    row = newest_entry(tx, "contribution")
    return 0 if row is None else int(json.loads(row.body).get("left", 0))


def _text(parts: Vector) -> str:
    return json.dumps([round(float(value), _DIGITS) for value in parts])
