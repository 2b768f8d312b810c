"""What a coordinator decides about the rounds: pausing them, ending the one under way, going back to a version.

A decision is an entry of the ledger and nothing else, so no kill can come between the record and what it records. A hub
that runs reads the newest one before it begins a round, whichever process wrote it.
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
"""Characters of a coordinator's words."""
_SKIPPED = "skipped by the coordinator"
_STOPPED = "ended by the coordinator, who paused the hub"
_WENT_BACK = "the coordinator went back to version "


@dataclass(frozen=True)
class Pause:
    """That no round begins.

    Attributes:
        since: Unix seconds.
        why: The coordinator's words; may be empty.
    """

    since: int
    why: str

    def __str__(self) -> str:
        return f"the hub is paused: {plain(self.why, MAX_WHY)}" if self.why else "the hub is paused"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"since": self.since, "why": self.why}


@dataclass(frozen=True)
class Rollback:
    """That an earlier version became the current one.

    Attributes:
        before: The current version until then.
        to: The current version from then on.
        aborted_round: The round that was under way.
    """

    before: Version
    to: Version
    aborted_round: int | None


class Steering:
    """A coordinator's decisions on one federation.

    Args:
        database: Has the ledger and the rounds.
        ledger: Takes the decisions.
        round_store: Ends a round.
        queue: Takes its tasks back.
    """

    def __init__(
        self, database: Database, ledger: Ledger, round_store: RoundStore, queue: MessageQueue
    ) -> None:
        self._database, self._ledger = database, ledger
        self._round_store, self._queue = round_store, queue

    def paused(self) -> Pause | None:
        """The pause that holds now."""
        with self._database.reading() as tx:
            return pause_of(tx)

    @rerun
    def pause(self, why: str = "", now: bool = False) -> int | None:
        """Let no further round begin; ``now`` ends the one under way.

        Returns:
            Number of the round that was ended.

        Raises:
            GymError: ``USAGE`` for a hub that is paused for the same reason, or words that cannot be shown.
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
        """Let rounds begin again.

        Raises:
            GymError: ``USAGE`` for a hub that is not paused.
        """
        with self._database.transaction() as tx:
            if pause_of(tx) is None:
                raise GymError(ErrorCode.USAGE, "the hub is not paused")
            self._ledger.append(tx, RESUMED, {"by": COORDINATOR})

    @rerun
    def skip(self, why: str = "") -> int | None:
        """End the round under way; its number, or None where there is none."""
        why = shown_words(why)
        with self._database.transaction() as tx:
            return self._end_round(tx, said_with(_SKIPPED, why))

    @rerun
    def rollback(self, height: int, why: str = "") -> Rollback:
        """Make an earlier version the current one; the round under way ends.

        Raises:
            GymError: ``NOT_FOUND`` for a version that was never made, ``USAGE`` for the current one.
        """
        why, base = shown_words(why), self._round_store.base_digest
        with self._database.transaction() as tx:
            before, to = head_of(tx, base), version_at(tx, height, base)
            if before.height == to.height:
                raise GymError(ErrorCode.USAGE, f"version {height} is the current one already")
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
            failpoint("steering")
        failpoint("after-steering")
        return Rollback(before, to, ended)

    def _end_round(self, tx: Connection, reason: str) -> int | None:
        """End the round under way, if there is one, and take its tasks back; its number."""
        current = latest_round(tx)
        if current is None or current.is_over:
            return None
        self._round_store.abort_in(tx, current.server_round, reason)
        self._queue.close_group_in(tx, str(current.server_round))
        return current.server_round


def pause_of(tx: Connection) -> Pause | None:
    """The pause that holds now."""
    row = newest_entry(tx, PAUSED, RESUMED)
    if row is None or row.kind != PAUSED:
        return None
    body = json.loads(row.body)
    return Pause(body["at"], body["reason"])


def is_coordinators(reason: str) -> bool:
    """Whether a round was ended by its coordinator, and not by what happened in it."""
    return reason.startswith((_SKIPPED, _STOPPED, _WENT_BACK))


def said_with(what: str, why: str) -> str:
    """What a coordinator did, with the reason where there is one."""
    return f"{what}: {why}" if why else what


def shown_words(why: str) -> str:
    """A coordinator's words, as everybody will be shown them.

    Raises:
        GymError: ``USAGE``.
    """
    why = why.strip()
    if len(why) > MAX_WHY or not why.isprintable():
        raise GymError(ErrorCode.USAGE, f"--reason is longer than {MAX_WHY} characters, or not printable")
    return why
