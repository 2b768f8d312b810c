"""The coordinator's decisions about rounds: pause, end the current round, roll back to a version.

A decision is stored only as a ledger entry, so no crash can separate the record from its effect. A running hub reads
the newest decision, written by any process, before it begins a round.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.text import plain
from gym_fed.trust.ledger.lineage import ROLLED_BACK
from gym_server.ledger.chain import Ledger
from gym_server.ledger.rows import newest_entry
from gym_server.rounds.queue import MessageQueue
from gym_server.rounds.round_store import RoundStore, latest_round
from gym_server.rounds.versions import Version, head_of, newest_height, version_at
from gym_server.store.database import Database, rerun

PAUSED, RESUMED = "paused", "resumed"
COORDINATOR = "coordinator"
MAX_WHY = 300
"""Maximum length of a coordinator's reason, in characters."""
_SKIPPED = "skipped by the coordinator"
_STOPPED = "ended by the coordinator, who paused the hub"
_WENT_BACK = "the coordinator went back to version "


@dataclass(frozen=True)
class Pause:
    """A pause, during which no new round begins.

    Attributes:
        since: Time of the pause, Unix seconds.
        why: The coordinator's reason; may be empty.
    """

    since: int
    why: str

    def __str__(self) -> str:
        return f"the hub is paused: {plain(self.why, MAX_WHY)}" if self.why else "the hub is paused"

    def to_dict(self) -> dict[str, Any]:
        """Return the pause as plain data."""
        return {"since": self.since, "why": self.why}


@dataclass(frozen=True)
class Rollback:
    """A rollback, which made an earlier version the current one.

    Attributes:
        before: The current version before the rollback.
        to: The current version after the rollback.
        aborted_round: Number of the round that was running; None if there was none.
    """

    before: Version
    to: Version
    aborted_round: int | None


class Steering:
    """Records and applies a coordinator's decisions in one federation.

    Args:
        database: Database with the ledger and the rounds.
        ledger: Ledger that records the decisions.
        round_store: Store of rounds, used to end the current round.
        queue: Queue from which the round's tasks are withdrawn.
    """

    def __init__(
        self, database: Database, ledger: Ledger, round_store: RoundStore, queue: MessageQueue
    ) -> None:
        self._database, self._ledger = database, ledger
        self._round_store, self._queue = round_store, queue

    def paused(self) -> Pause | None:
        """Return the current pause, or None."""
        with self._database.reading() as tx:
            return pause_of(tx)

    @rerun
    def pause(self, why: str = "", now: bool = False) -> int | None:
        """Start no more rounds; ``now`` also ends the current one.

        Returns:
            Number of the round that was ended.

        Raises:
            GymError: ``USAGE`` if the hub is paused for the same reason, or if the reason is too long or not printable.
        """
        why = shown_words(why)
        with self._database.transaction() as tx:
            before = pause_of(tx)
            ended = self._end_round(tx, said_with(_STOPPED, why)) if now else None
            if before is None or before.why != why:
                self._ledger.append(tx, PAUSED, {"by": COORDINATOR, "reason": why})
            elif ended is None:
                raise GymError(ErrorCode.USAGE, str(before), "gym-server resume ends the pause")
        return ended

    @rerun
    def resume(self) -> None:
        """Allow new rounds again.

        Raises:
            GymError: ``USAGE`` if the hub is not paused.
        """
        with self._database.transaction() as tx:
            if pause_of(tx) is None:
                raise GymError(ErrorCode.USAGE, "the hub is not paused")
            self._ledger.append(tx, RESUMED, {"by": COORDINATOR})

    @rerun
    def skip(self, why: str = "") -> int | None:
        """End the current round; return its number, or None if there is none."""
        why = shown_words(why)
        with self._database.transaction() as tx:
            return self._end_round(tx, said_with(_SKIPPED, why))

    @rerun
    def rollback(self, height: int, why: str = "") -> Rollback:
        """Make an earlier version the current one; the current round ends.

        Raises:
            GymError: ``NOT_FOUND`` for a version that does not exist, ``USAGE`` for the current one.
        """
        with self._database.transaction() as tx:
            done = self.rollback_in(tx, height, shown_words(why))
            if done.before.height == done.to.height:
                raise GymError(ErrorCode.USAGE, f"version {height} is already the current one")
            failpoint("steering")
        failpoint("after-steering")
        return done

    def rollback_in(self, tx: Connection, height: int, why: str) -> Rollback:
        """Like ``rollback``, inside the caller's transaction; rolling back to the current version writes nothing."""
        base = self._round_store.base_digest
        before, to = head_of(tx, base), version_at(tx, height, base)
        if before.height == to.height:
            return Rollback(before, to, None)
        ended = self._end_round(tx, said_with(f"{_WENT_BACK}{height}", why))
        body = {
            "by": COORDINATOR,
            "reason": why,
            "from": before.digest,
            "from_height": before.height,
            "to": to.digest,
            "to_height": to.height,
            "newest_height": newest_height(tx),
        }
        self._ledger.append(tx, ROLLED_BACK, body)
        return Rollback(before, to, ended)

    def _end_round(self, tx: Connection, reason: str) -> int | None:
        """End the current round, if there is one, and withdraw its tasks; return its number."""
        current = latest_round(tx)
        if current is None or current.is_over:
            return None
        self._round_store.abort_in(tx, current.server_round, reason)
        self._queue.close_group_in(tx, str(current.server_round))
        return current.server_round


def pause_of(tx: Connection) -> Pause | None:
    """Return the current pause, or None."""
    row = newest_entry(tx, PAUSED, RESUMED)
    if row is None or row.kind != PAUSED:
        return None
    body = json.loads(row.body)
    return Pause(body["at"], body["reason"])


def is_coordinators(reason: str) -> bool:
    """Return True if this is the reason of a round that the coordinator ended."""
    return reason.startswith((_SKIPPED, _STOPPED, _WENT_BACK))


def said_with(what: str, why: str) -> str:
    """Return a coordinator's action, with the reason if there is one."""
    return f"{what}: {why}" if why else what


def shown_words(why: str) -> str:
    """Return a coordinator's reason without surrounding whitespace, after checking that it can be displayed.

    Raises:
        GymError: ``USAGE`` if it is too long or not printable.
    """
    why = why.strip()
    if len(why) > MAX_WHY or not why.isprintable():
        raise GymError(ErrorCode.USAGE, f"--reason is longer than {MAX_WHY} characters, or not printable")
    return why
