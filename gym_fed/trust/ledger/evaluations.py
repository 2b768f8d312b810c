"""Evaluations in the ledger: the hub commits to a secret seed before the round and reveals it afterwards.

An ``evaluation-seed`` entry contains the ``commitment`` for a round and is written before the round begins. An
``evaluated`` entry contains the ``seed`` and, per task, the number of rows, a digest of the drawn rows and the result.
Anyone with the ledger can repeat the draw. The coordinator cannot choose rows after seeing the updates, and
contributors cannot train on the rows that will evaluate them.
"""

from __future__ import annotations

import hashlib
from typing import Any

from gym_fed.core.json_files import canonical_digest
from gym_fed.core.text import counted
from gym_fed.trust.ledger.entries import Entry, corrupt

SEED_KIND = "evaluation-seed"
EVALUATED = "evaluated"
SEED_BYTES = 32
_MAX_ROWS = 1_000_000
"""Maximum number of rows over all tasks of one evaluation, since each costs a hash during verification."""


def commitment(seed: bytes, server_round: int) -> str:
    """Return the commitment to a secret seed: the hex SHA-256 of the seed and the round."""
    return canonical_digest({"gym-evaluation-seed-1": {"seed": seed.hex(), "server_round": server_round}})


def drawn_rows(seed: bytes, task: str, total: int, limit: int) -> list[int]:
    """Draw rows of a task: the ``limit`` rows with the smallest SHA-256 of seed, task and row number.

    Args:
        seed: Seed of the round.
        task: Name of the task.
        total: Number of rows of the task.
        limit: Number of rows to draw, at most ``total``.

    Returns:
        Row numbers, starting from 0, sorted.
    """
    begin = hashlib.sha256(seed + task.encode("utf-8"))

    def place(row: int) -> bytes:
        digest = begin.copy()
        digest.update(row.to_bytes(8, "big"))
        return digest.digest()

    return sorted(sorted(range(total), key=place)[:limit])


def rows_digest(rows: list[int]) -> str:
    """Return the digest of row numbers, as recorded in an ``evaluated`` entry."""
    return canonical_digest(rows)


class EvaluationCheck:
    """Verifies that seeds match their commitments, and that drawn rows match the seeds.

    Attributes:
        late: Rounds whose seed was committed only after they began, although the hub had one for the previous round.
            When a hub starts to evaluate, this is expected once; otherwise the rows may have been chosen after the
            updates were known.
        promised: Commitments, by round.
    """

    def __init__(self) -> None:
        self.late: list[int] = []
        self.promised: dict[int, str] = {}
        self._revealed: set[int] = set()
        self._begun: set[int] = set()

    def add(self, entry: Entry, body: dict[str, Any]) -> None:
        """Process the next entry.

        Raises:
            GymError: ``STATE_CORRUPT`` with the entry and what is wrong with it.
        """
        if entry.kind == SEED_KIND:
            self._promise(entry, body)
        elif entry.kind == EVALUATED:
            if "seed" in body:
                self._reveal(entry, body)
        elif isinstance(server_round := body.get("server_round"), int):
            self._begun.add(server_round)

    def _promise(self, entry: Entry, body: dict[str, Any]) -> None:
        where, server_round = f"entry {entry.sequence} ({entry.kind})", body.get("server_round")
        if not isinstance(server_round, int) or not isinstance(body.get("commitment"), str):
            raise corrupt(f"{where}: it lacks a round or a commitment")
        if server_round in self.promised:
            raise corrupt(f"{where}: round {server_round} already has a commitment")
        if body.get("state") == "open" and server_round in self._begun:
            raise corrupt(f"{where}: round {server_round} had already begun")
        if body.get("state") != "open" and server_round - 1 in self.promised:
            self.late.append(server_round)
        self.promised[server_round] = body["commitment"]

    def _reveal(self, entry: Entry, body: dict[str, Any]) -> None:
        where, server_round = f"entry {entry.sequence} ({entry.kind})", body.get("server_round")
        promised = self.promised.get(server_round) if isinstance(server_round, int) else None
        if promised is None:
            raise corrupt(f"{where}: no earlier entry commits to the seed of round {server_round}")
        if server_round in self._revealed:
            raise corrupt(f"{where}: the seed of round {server_round} was already revealed")
        try:
            seed = bytes.fromhex(body["seed"])
            if commitment(seed, int(body["server_round"])) != promised:
                raise corrupt(f"{where}: the seed does not match the commitment of round {server_round}")
            left = _MAX_ROWS
            for suite in body["suites"]:
                for task, drawn in suite["tasks"].items():
                    total, limit = int(drawn["total_rows"]), int(suite["limit"])
                    if not 0 < total <= left:
                        raise corrupt(
                            f"{where}: task {task[:80]} has {counted(total, 'row')}; one evaluation has at most "
                            f"{_MAX_ROWS}"
                        )
                    left -= total
                    if rows_digest(drawn_rows(seed, task, total, limit)) != drawn["rows_sha256"]:
                        raise corrupt(f"{where}: task {task[:80]}: the rows do not match the seed")
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise corrupt(f"{where}: it is not a valid evaluation record: {error!r:.80}") from error
        self._revealed.add(int(body["server_round"]))
