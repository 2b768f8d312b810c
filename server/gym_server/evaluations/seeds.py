"""The secret seed that determines a round's evaluation rows and audited steps.

The ledger records a commitment to the seed at the start of the round, and the seed itself at the end.
"""

from __future__ import annotations

import os

from sqlalchemy import Connection, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.ledger.evaluations import SEED_BYTES, SEED_KIND, commitment
from gym_server.ledger.chain import Ledger
from gym_server.store.database import Database
from gym_server.store.tables import evaluation_seeds, rounds


def promise_seed(tx: Connection, ledger: Ledger, server_round: int) -> None:
    """Draw the seed of a round once and append its commitment, in the transaction that opens the round.

    If evaluations or audits are first configured during a round, the hub commits at that time; the entry records the
    round's state.
    """
    held = select(evaluation_seeds.c.server_round).where(evaluation_seeds.c.server_round == server_round)
    if tx.scalar(held) is not None:
        return
    seed = os.urandom(SEED_BYTES)
    tx.execute(evaluation_seeds.insert().values(server_round=server_round, seed=seed))
    state = tx.scalar(select(rounds.c.state).where(rounds.c.server_round == server_round))
    body = {"server_round": server_round, "commitment": commitment(seed, server_round), "state": str(state)}
    ledger.append(tx, SEED_KIND, body)


def seed_of(database: Database, server_round: int) -> bytes:
    """Return the seed of a round.

    Raises:
        GymError: ``STATE_CORRUPT`` if none was drawn.
    """
    with database.reading() as tx:
        return seed_in(tx, server_round)


def seed_in(tx: Connection, server_round: int) -> bytes:
    """Like ``seed_of``, inside the caller's transaction."""
    seed = tx.scalar(select(evaluation_seeds.c.seed).where(evaluation_seeds.c.server_round == server_round))
    if seed is None:
        raise GymError(
            ErrorCode.STATE_CORRUPT,
            f"the seed of round {server_round} is missing",
            "restore the hub's folder from a backup",
        )
    return bytes(seed)
