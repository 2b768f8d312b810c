"""The stored rounds: a state machine that survives crashes.

``open > collecting > merging > committed``, or ``aborted`` from any of the first three. A transition checks the current
state inside its transaction. A commit writes version, verdicts, ledger and credits in one transaction. A round that is
killed at any point therefore either resumes from its last state or has ended.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, select, update

from gym_fed.config.hub.task import SoupReference, TaskSpec, next_digest
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import without_folders
from gym_fed.trust.ledger.entries import seal
from gym_server.ledger.chain import Ledger
from gym_server.ledger.columns import round_of
from gym_server.ledger.pace import summarise_refusals
from gym_server.rounds.round_history import history_of
from gym_server.rounds.soup_record import Judgement, SoupRecord
from gym_server.rounds.versions import (
    Version,
    VersionDepths,
    VersionSums,
    head_of,
    newest_height,
    soups_to,
    version_at,
)
from gym_server.store.database import Database, insert_if_absent, rerun
from gym_server.store.tables import credits, messages, readers, round_tasks, rounds, updates, versions

PAID_VERDICTS = ("merged", "duplicate")
"""Verdicts of updates that can earn credits; ``duplicate`` means that an equal update was merged."""

OPEN, COLLECTING, MERGING, COMMITTED, ABORTED = "open", "collecting", "merging", "committed", "aborted"


@dataclass(frozen=True)
class Round:
    """A row of the table of rounds."""

    server_round: int
    state: str
    task: TaskSpec | str | None
    base_height: int
    merging: list[str]
    reason: str

    @property
    def is_over(self) -> bool:
        return self.state in (COMMITTED, ABORTED)

    @functools.cached_property
    def spec(self) -> TaskSpec | None:
        """The ``task``, parsed on first use, since the plug-ins of an ended round may no longer be installed."""
        return TaskSpec.model_validate_json(self.task) if isinstance(self.task, str) else self.task


class RoundStore:
    """Rounds and versions of one federation.

    Args:
        database: The hub's database.
        ledger: The hub's ledger.
        base_digest: Digest of the base model.
        clock: The hub's clock, Unix seconds.
    """

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        base_digest: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._clock = clock
        self._ledger = ledger
        self.base_digest = base_digest
        self.depths, self.sums = VersionDepths(), VersionSums()
        self.at_open: list[Callable[[Connection, int], object]] = []
        self.at_commit: list[Callable[[Connection], object]] = []
        """Functions called at the end of a commit; those in ``at_open`` are called with the number of the new round."""

    # ---- reading ----

    def current(self) -> Round | None:
        """Return the latest round, in any state."""
        with self._database.reading() as tx:
            return latest_round(tx)

    def require(self, server_round: int) -> Round:
        """Return the latest round, which must be this one.

        Raises:
            GymError: ``INTERNAL`` if the latest round is a different one.
        """
        current = self.current()
        if current is None or current.server_round != server_round:
            raise GymError(ErrorCode.INTERNAL, f"round {server_round} is not the current one")
        return current

    def history(self) -> list[dict[str, Any]]:
        """Return every round with its version and the counts of its verdicts, oldest first."""
        with self._database.reading() as tx:
            return history_of(tx)

    def head(self) -> Version:
        """Return the current version, which the next round starts from."""
        with self._database.reading() as tx:
            return head_of(tx, self.base_digest)

    def version(self, height: int) -> Version:
        """Return a version by its height.

        Raises:
            GymError: ``NOT_FOUND`` if there is none.
        """
        with self._database.reading() as tx:
            return version_at(tx, height, self.base_digest)

    def soups(self, height: int | None = None) -> list[SoupReference]:
        """Return the soups from the base to a version (by default the current one), in order."""
        with self._database.reading() as tx:
            at = head_of(tx, self.base_digest).height if height is None else height
            return soups_to(tx, at, self.sums.read(tx))

    def newest_height(self) -> int:
        """Return the height of the most recent version, whether current or abandoned."""
        with self._database.reading() as tx:
            return newest_height(tx)

    def num_committed(self) -> int:
        """Return the number of committed rounds in the current version, without those of abandoned versions."""
        with self._database.reading() as tx:
            return self.depths.of(tx, head_of(tx, self.base_digest).height)

    def tasks(self, server_round: int) -> dict[int, tuple[str, str]]:
        """Return (message id, outcome) of a round's tasks, by node id."""
        with self._database.reading() as tx:
            rows = tx.execute(select(round_tasks).where(round_tasks.c.server_round == server_round)).all()
        return {int(r.node_id): (r.message_id, r.outcome) for r in rows}

    def judged(self, update_id: str) -> Any | None:
        """Return the row of a judged update, or None."""
        with self._database.reading() as tx:
            return tx.execute(select(updates).where(updates.c.update_id == update_id)).first()

    def received_at(self, server_round: int) -> list[float]:
        """Return the arrival times of a round's admitted updates, in order, in Unix seconds."""
        where = (updates.c.server_round == server_round) & (updates.c.verdict == "admitted")
        with self._database.reading() as tx:
            return list(
                tx.scalars(select(updates.c.received_at).where(where).order_by(updates.c.received_at))
            )

    def admitted(self, server_round: int) -> list[Any]:
        """Return the rows of a round's admitted updates, ordered by id."""
        with self._database.reading() as tx:
            return _admitted(tx, server_round)

    # ---- transitions ----

    @rerun
    def open_next(self) -> Round:
        """Open the next round; the latest one must have ended."""
        with self._database.transaction() as tx:
            last = tx.execute(select(rounds).order_by(rounds.c.server_round.desc()).limit(1)).first()
            if last is not None and last.state not in (COMMITTED, ABORTED):
                raise GymError(ErrorCode.INTERNAL, f"round {last.server_round} is still {last.state}")
            number = last.server_round + 1 if last else 1
            height = head_of(tx, self.base_digest).height
            opened = {
                "server_round": number,
                "state": OPEN,
                "base_height": height,
                "opened_at": self._clock(),
            }
            tx.execute(rounds.insert().values(**opened))
            for write in self.at_open:
                write(tx, number)
        return self._get(number)

    @rerun
    def start_collecting(self, server_round: int, spec: TaskSpec) -> Round:
        """Set the task of the round and start collecting updates."""
        with self._database.transaction() as tx:
            values = {"spec": spec.model_dump_json(), "deadline": spec.deadline_seconds}
            _advance(tx, server_round, OPEN, COLLECTING, values)
        return self._get(server_round)

    @rerun
    def record_tasks(self, server_round: int, message_ids: Mapping[int, str]) -> None:
        """Record the message with which each node got the round's task, possibly again after a lost lease."""
        with self._database.transaction() as tx:
            for node_id, message_id in message_ids.items():
                key = (round_tasks.c.server_round == server_round) & (round_tasks.c.node_id == node_id)
                tx.execute(round_tasks.delete().where(key))
                row = {"server_round": server_round, "node_id": node_id, "message_id": message_id}
                tx.execute(round_tasks.insert().values(**row))

    @rerun
    def record_outcomes(self, server_round: int, outcomes: Mapping[str, str]) -> None:
        """Record the outcomes of tasks by message id."""
        with self._database.transaction() as tx:
            for message_id, outcome in outcomes.items():
                key = (round_tasks.c.server_round == server_round) & (round_tasks.c.message_id == message_id)
                tx.execute(update(round_tasks).where(key).values(outcome=outcome))

    @rerun
    def start_merging(self, server_round: int) -> Round:
        """Freeze the list of admitted updates; later updates are stale."""
        with self._database.transaction() as tx:
            ids = [row.update_id for row in _admitted(tx, server_round)]
            _advance(tx, server_round, COLLECTING, MERGING, {"merging": json.dumps(ids)})
        return self._get(server_round)

    @rerun
    def commit(
        self, merged: Round, soup: SoupRecord, also: Callable[[Connection], object] = lambda _: None
    ) -> Version:
        """Write version, verdicts, ledger, credits, the writes of ``also`` and the round's end in one transaction."""
        with self._database.transaction() as tx:
            version = self._commit_in(tx, merged, soup, also)
            self._ledger.sign_head(tx)
        return version

    def _commit_in(
        self,
        tx: Connection,
        merged: Round,
        soup: SoupRecord,
        also: Callable[[Connection], object] = lambda _: None,
    ) -> Version:
        _advance(tx, merged.server_round, MERGING, COMMITTED, {"closed_at": self._clock()})
        parent, height = head_of(tx, self.base_digest), newest_height(tx) + 1
        integers = None if soup.integers is None else str(soup.integers["digest"])
        digest = next_digest(parent.digest, soup.sha256, merged.server_round, integers)
        for judgement in soup.judgements:
            self.judge(tx, merged.server_round, judgement)
        used = sorted(j.update_id for j in soup.judgements if j.verdict == "merged")
        version = {
            "height": height,
            "digest": digest,
            "server_round": merged.server_round,
            "heldout_before": soup.heldout_before,
            "heldout_after": soup.heldout_after,
        }
        made = {"parent": parent.digest, "merged": used, **soup.entry_fields()}
        summarise_refusals(tx, self._ledger, merged.server_round)
        made["round"] = _digest_of(tx, merged.server_round)
        self._ledger.append(tx, "version", {**version, **made, "updates": merged.merging})
        tx.execute(
            versions.insert().values(
                **version,
                soup_sha256=soup.sha256,
                soup_bytes=soup.size_bytes,
                residual=soup.residual,
                parent=parent.height,
                num_updates=len(used),
                committed_at=self._clock(),
            )
        )
        for sha256 in (soup.sha256, *([soup.integers["sum"]] if soup.integers else [])):
            insert_if_absent(tx, readers, sha256=sha256, contributor="*")
        for write in soup.also:
            write(tx, height)
        for judgement in soup.judgements:
            if judgement.credit:
                self._credit(tx, merged.server_round, judgement)
        also(tx)
        for settle in self.at_commit:
            settle(tx)
        return Version(height, digest, soup.residual, merged.server_round, parent.height)

    def take_over(self, tx: Connection, soup: SoupRecord) -> Version:
        """Make another hub's version the current one, recorded as a round without tasks or updates.

        The latest round must have ended. Everything is written in the caller's transaction, so that a retry repeats all
        of it.
        """
        last, height = latest_round(tx), head_of(tx, self.base_digest).height
        taken = Round((last.server_round if last else 0) + 1, MERGING, None, height, [], "")
        row = {"server_round": taken.server_round, "base_height": height, "opened_at": self._clock()}
        tx.execute(rounds.insert().values(**row, state=MERGING, merging="[]"))
        return self._commit_in(tx, taken, soup)

    @rerun
    def abort(
        self,
        server_round: int,
        reason: str,
        judgements: Sequence[Judgement] = (),
        also: Callable[[Connection], object] = lambda _: None,
    ) -> None:
        """End a round without a version; its updates earn nothing, and the reason is recorded in the ledger."""
        with self._database.transaction() as tx:
            self.abort_in(tx, server_round, reason, judgements)
            also(tx)
            self._ledger.sign_head(tx)

    def abort_in(
        self, tx: Connection, server_round: int, reason: str, judgements: Sequence[Judgement] = ()
    ) -> None:
        """Like ``abort``, inside the caller's transaction."""
        reason = without_folders(reason)  # the ledger is public
        state = tx.scalar(select(rounds.c.state).where(rounds.c.server_round == server_round))
        _advance(tx, server_round, str(state), ABORTED, {"closed_at": self._clock(), "reason": reason})
        for judgement in judgements:
            self.judge(tx, server_round, judgement)
        for row in _admitted(tx, server_round):
            judgement = Judgement(row.update_id, row.contributor, "aborted", f"round aborted: {reason}")
            self.judge(tx, server_round, judgement)
        summarise_refusals(tx, self._ledger, server_round)
        ended = {"server_round": server_round, "reason": reason, "round": _digest_of(tx, server_round)}
        self._ledger.append(tx, "aborted", ended)

    # ---- helpers ----

    def judge(self, tx: Connection, server_round: int, judgement: Judgement) -> None:
        """Write a verdict and its ledger entry inside the caller's transaction."""
        judgement = replace(judgement, reason=without_folders(judgement.reason))  # the ledger is public
        tx.execute(
            update(updates)
            .where(updates.c.update_id == judgement.update_id)
            .values(
                verdict=judgement.verdict, reason=judgement.reason, heldout_change=judgement.heldout_change
            )
        )
        body = {
            "update": judgement.update_id,
            "contributor": judgement.contributor,
            "server_round": server_round,
            "verdict": judgement.verdict,
            "reason": judgement.reason,
        }
        if self._ledger.private and judgement.verdict == "rejected":
            body["reason"] = ErrorCode.UPDATE_REFUSED.value  # the reason may quote content of the update
            row = tx.execute(select(updates).where(updates.c.update_id == judgement.update_id)).one()
            body["seal"] = seal(row.manifest, judgement.verdict, row.code, judgement.reason)
        measured = ("heldout_change", "score", "error")
        body |= {key: value for key in measured if (value := getattr(judgement, key)) is not None}
        self._ledger.append(tx, "verdict", body)

    def _credit(self, tx: Connection, server_round: int, judgement: Judgement) -> None:
        row = {"server_round": server_round, "contributor": judgement.contributor, "amount": judgement.credit}
        tx.execute(credits.insert().values(**row))
        self._ledger.append(tx, "credit", row)

    def _get(self, server_round: int) -> Round:
        with self._database.reading() as tx:
            return _round(tx.execute(select(rounds).where(rounds.c.server_round == server_round)).one())


def latest_round(tx: Connection) -> Round | None:
    """Return the latest round, in any state."""
    row = tx.execute(select(rounds).order_by(rounds.c.server_round.desc()).limit(1)).first()
    return _round(row) if row else None


def _admitted(tx: Connection, server_round: int) -> list[Any]:
    where = (updates.c.server_round == server_round) & (updates.c.verdict == "admitted")
    return list(tx.execute(select(updates).where(where).order_by(updates.c.update_id)).all())


def _advance(tx: Connection, server_round: int, before: str, after: str, values: dict[str, Any]) -> None:
    state = tx.scalar(select(rounds.c.state).where(rounds.c.server_round == server_round))
    if state != before or before in (COMMITTED, ABORTED):
        raise GymError(
            ErrorCode.INTERNAL, f"round {server_round} is {state}; cannot go from {before} to {after}"
        )
    tx.execute(update(rounds).where(rounds.c.server_round == server_round).values(state=after, **values))
    if after in (
        COMMITTED,
        ABORTED,
    ):  # answered tasks are not read again, and each names all soups since the base
        judged = (round_tasks.c.server_round == server_round) & (round_tasks.c.outcome != "")
        answered = messages.c.message_id.in_(select(round_tasks.c.message_id).where(judged))
        tx.execute(update(messages).where(answered, messages.c.state == "replied").values(content=b""))


def _digest_of(tx: Connection, server_round: int) -> str:
    """Return the digest of an ended round's row, for its ledger entry."""
    row = tx.execute(select(rounds).where(rounds.c.server_round == server_round)).mappings().one()
    return round_of(row)


def _round(row: Any) -> Round:
    merging = json.loads(row.merging) if row.merging else []
    return Round(row.server_round, row.state, row.spec or None, row.base_height, merging, row.reason)
