"""The ledger of a hub; entries are appended in the same transaction as the data they record.

A transaction that appends entries signs a head over them when it commits. Heads are signed only over such entries, so
an entry that was inserted in any other way has no head and is detected.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from sqlalchemy import Connection, func, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.trust.identity.keys import SigningKey, server_id
from gym_fed.trust.ledger.entries import GENESIS_HASH, Entry, canonical_text, corrupt, subjects
from gym_fed.trust.ledger.heads import FORMAT, HEADS_BEFORE, EntryProof, Head, SignedHead
from gym_fed.trust.ledger.merkle import Frontier, Tree
from gym_fed.trust.ledger.restored import FORMAT as RESTORED_FORMAT
from gym_fed.trust.ledger.restored import KIND as RESTORED
from gym_fed.trust.ledger.restored import MAX_REASON, Restored, SignedRestored
from gym_server.ledger.anchor import Anchor, restored_entries
from gym_server.ledger.checks import verify_database
from gym_server.ledger.rows import entries_from, entry_of, hash_of, heads_from, newest_head, signed_heads
from gym_server.ledger.times import stamp
from gym_server.store.database import Database
from gym_server.store.tables import ledger, ledger_heads, ledger_subjects, rounds

_BATCH = 2000


class Ledger:
    """The ledger of one hub, which writes in the caller's transaction and reads in its own.

    Args:
        database: The database that holds the ledger.
        key: The hub's signing key.
        anchor: File outside the database that stores the newest head; None disables it.
        clock: Clock, Unix seconds; tests pass their own.
        private: True if entries about updates must reveal only the hour in which they were written.

    Raises:
        GymError: ``STATE_CORRUPT`` if a schema 1 database has an entry that the key did not sign.
    """

    def __init__(
        self,
        database: Database,
        key: SigningKey,
        anchor: Path | None = None,
        clock: Callable[[], float] = time.time,
        private: bool = False,
    ) -> None:
        self.private = private
        self._database = database
        self._key = key
        self._server = server_id(key.public_key)
        self._tree = Tree()
        self._statements: list[str] | None = None
        self._lock = threading.Lock()
        self._anchor = Anchor(anchor, key.public_key)
        self._clock = clock
        self._appended: WeakKeyDictionary[Connection, dict[int, Entry]] = WeakKeyDictionary()
        database.before_commit.append(self._seal)
        database.after_commit.append(self._keep_newest)

    @property
    def public_key(self) -> bytes:
        """The 32-byte Ed25519 public key."""
        return self._key.public_key

    # ---- writing ----

    def append(self, tx: Connection, kind: str, body: dict[str, Any]) -> Entry:
        """Append an entry, which is covered by a signed head once ``tx`` commits."""
        last = tx.execute(
            select(ledger.c.sequence, ledger.c.hash).order_by(ledger.c.sequence.desc()).limit(1)
        ).first()
        previous = (last.sequence, last.hash) if last else None
        when = stamp(tx, kind, body, self._clock(), self.private)
        entry = Entry.following(previous, kind, {**body, **when, HEADS_BEFORE: signed_heads(tx)})
        self._appended.setdefault(tx, {})[entry.sequence] = entry
        tx.execute(
            ledger.insert().values(
                sequence=entry.sequence,
                kind=kind,
                body=entry.body_json,
                previous_hash=entry.previous_hash,
                hash=entry.hash,
            )
        )
        for contributor in sorted(subjects(entry.body_json)):
            tx.execute(ledger_subjects.insert().values(sequence=entry.sequence, contributor=contributor))
        return entry

    def sign_head(self, tx: Connection) -> SignedHead | None:
        """Return the head of the newest entry, signing it on first use; None if the ledger is empty.

        Raises:
            GymError: ``STATE_CORRUPT`` if there are unsigned entries that ``tx`` did not append, or fewer entries than
                signed heads cover.
        """
        last = tx.execute(select(ledger_heads).order_by(ledger_heads.c.size.desc()).limit(1)).first()
        before = SignedHead.from_json(last.head) if last else None
        size = before.size if before else 0
        new = select(ledger.c.sequence, ledger.c.hash).where(ledger.c.sequence > size)
        rows = tx.execute(new.order_by(ledger.c.sequence)).all()
        if not rows:
            return before
        own = self._appended.get(tx, {})
        for row in rows:
            if row.sequence not in own or own[row.sequence].hash != row.hash:
                raise corrupt(
                    f"no signed head covers entry {row.sequence}: the hub did not write it, or its heads were deleted"
                )
        frontier = Frontier.from_text(size, last.frontier) if last else Frontier()
        if before is not None:
            self._check_last(tx, before, frontier)
        self._anchor.check(tx, size)
        for row in rows:
            frontier.append(row.hash)
        at = max(
            int(own[row.sequence].body["at"]) for row in rows
        )  # reveals no more about a private round than the entries do
        return self._sign(tx, frontier, rows[-1].hash, before, at)

    def restored(
        self, reason: str, at_entry: int | None = None, lost: SignedHead | None = None
    ) -> SignedRestored:
        """Sign a statement that the hub continues from an older state, and append it in a separate transaction.

        Args:
            reason: The coordinator's reason, shown to contributors.
            at_entry: Number of the last entry that remains valid; None for the newest.
            lost: Highest known head of the lost part; None for the anchor's head, if the ledger does not contain it.

        Raises:
            GymError: ``USAGE`` for an entry that does not exist, or a lost head that is in the ledger.
        """
        if len(reason) > MAX_REASON or not reason.isprintable():
            raise GymError(
                ErrorCode.USAGE, f"the reason is longer than {MAX_REASON} characters, or not printable"
            )
        anchored = self._anchor.read()
        with self._database.transaction() as tx:
            size = int(tx.scalar(select(func.max(ledger.c.sequence))) or 0)
            entry = size if at_entry is None else at_entry
            stands = hash_of(tx, entry) if entry else GENESIS_HASH
            if stands is None:
                raise GymError(ErrorCode.USAGE, f"the ledger has no entry {entry}; its newest is {size}")
            known = [head for head in (anchored, lost) if head is not None and not self._holds(tx, head)]
            for head in known:
                head.verify(self.public_key)
            if lost is not None and lost not in known:
                raise GymError(
                    ErrorCode.USAGE,
                    f"the head of entry {lost.size} is in the ledger: no entry up to it is lost",
                    "omit it, or pass a head that contributors have and the hub cannot show",
                )
            highest = max(known, key=lambda head: head.size, default=None)
            times = [head.head.at for head in (*known, newest_head(tx)) if head is not None]
            signed = SignedRestored.sign(
                self._key,
                Restored(
                    RESTORED_FORMAT,
                    self._server,
                    entry,
                    stands,
                    max(int(self._clock()), *times, 0),
                    reason,
                    None if highest is None else highest.to_dict(),
                ),
            )
            self._anchor.supersede()
            self.append(tx, RESTORED, signed.to_dict())
        self._statements = None
        return signed

    def _holds(self, tx: Connection, head: SignedHead) -> bool:
        return hash_of(tx, head.size) == head.head.hash

    def statements(self) -> list[str]:
        """Return the statements that the hub was restored, oldest first, as in ``StatusReply.restored_json``.

        The ledger is searched only once, since every status call returns the statements and a running hub adds none.
        """
        if self._statements is None:
            with self._database.reading() as tx:
                found = restored_entries(tx)
            self._statements = [
                canonical_text({**signed.to_dict(), "entry": sequence}) for sequence, signed in found
            ]
        return list(self._statements)

    def _check_last(self, tx: Connection, signed: SignedHead, frontier: Frontier) -> None:
        """Verify the last head before the next one is signed over it."""
        signed.verify(self.public_key)
        if (hash_of(tx, signed.size), frontier.root()) != (signed.head.hash, signed.head.root):
            raise corrupt(f"head {signed.size} does not match the stored entries")

    def _sign(
        self, tx: Connection, frontier: Frontier, entry_hash: str, before: SignedHead | None, at: int
    ) -> SignedHead:
        head = Head(
            FORMAT,
            self._server,
            frontier.size,
            entry_hash,
            frontier.root(),
            int(tx.scalar(select(func.max(rounds.c.server_round))) or 0),
            max(before.head.at if before else 0, at),
        )
        signed = SignedHead.sign(self._key, head)
        tx.execute(
            ledger_heads.insert().values(
                size=frontier.size, head=signed.to_json(), frontier=frontier.to_text()
            )
        )
        return signed

    def _seal(self, tx: Connection) -> None:
        if tx in self._appended:
            self.sign_head(tx)

    def _keep_newest(self, tx: Connection) -> None:
        if self._appended.pop(tx, None):
            self._anchor.keep(self.newest_head())

    def receipt(self, tx: Connection, sequence: int) -> EntryProof:
        """Return a proof of an entry under the head of its own size, which is signed now if the entry is the newest."""
        newest = self.sign_head(tx)
        entry = entry_of(tx.execute(select(ledger).where(ledger.c.sequence == sequence)).one())
        own = tx.scalar(select(ledger_heads.c.head).where(ledger_heads.c.size == sequence))
        if own is not None:
            return EntryProof(entry, SignedHead.from_json(own))
        # The same transaction appended further entries before its head was signed.
        assert newest is not None
        until = select(ledger.c.hash).where(ledger.c.sequence <= newest.size).order_by(ledger.c.sequence)
        path = Tree(tx.scalars(until)).inclusion(sequence - 1, newest.size)
        return EntryProof(entry, newest, tuple(path))

    # ---- reading ----

    def entries(self, from_sequence: int = 1) -> Iterator[Entry]:
        """Yield all entries from a sequence number on, read in batches."""
        while True:
            with self._database.reading() as tx:
                rows = tx.execute(entries_from(from_sequence).limit(_BATCH)).all()
            for row in rows:
                yield entry_of(row)
            if not rows:
                return
            from_sequence = rows[-1].sequence + 1

    def about(self, contributor: str, from_sequence: int = 1) -> Iterator[Entry]:
        """Yield the entries that name a contributor."""
        named = select(ledger_subjects.c.sequence).where(ledger_subjects.c.contributor == contributor)
        with self._database.reading() as tx:
            rows = tx.execute(entries_from(from_sequence).where(ledger.c.sequence.in_(named))).all()
        yield from map(entry_of, rows)

    def rounds_of(self, contributor: str, most: int = 500) -> dict[int, list[int]]:
        """Return the sequence numbers of the newest entries of rounds that name a contributor, by round."""
        named = select(ledger_subjects.c.sequence).where(ledger_subjects.c.contributor == contributor)
        newest = named.order_by(ledger_subjects.c.sequence.desc()).limit(most)
        with self._database.reading() as tx:
            rows = tx.execute(entries_from(1).where(ledger.c.sequence.in_(newest))).all()
        found: dict[int, list[int]] = {}
        for entry in map(entry_of, rows):
            server_round = entry.body.get("server_round")
            if entry.kind != "version" and isinstance(server_round, int):
                found.setdefault(server_round, []).append(entry.sequence)
        return found

    def newest_head(self) -> SignedHead | None:
        """Return the newest signed head."""
        with self._database.reading() as tx:
            return newest_head(tx)

    def heads(self, from_size: int = 1) -> Iterator[SignedHead]:
        """Yield all signed heads from a size on, read in batches."""
        while True:
            with self._database.reading() as tx:
                rows = tx.execute(heads_from(from_size).limit(_BATCH)).all()
            for row in rows:
                yield SignedHead.from_json(row.head)
            if not rows:
                return
            from_size = rows[-1].size + 1

    def proof(self, sequence: int, size: int = 0) -> EntryProof:
        """Return an entry with its inclusion proof under a signed head.

        Args:
            sequence: Sequence number of the entry.
            size: Size of a signed head; 0 for the newest.

        Raises:
            GymError: ``NOT_FOUND`` if there is no such entry, or no such head over it.
        """
        with self._database.reading() as tx:
            row = tx.execute(entries_from(sequence).limit(1)).first()
            newest = int(tx.scalar(select(func.max(ledger_heads.c.size))) or 0)
            text = tx.scalar(select(ledger_heads.c.head).where(ledger_heads.c.size == (size or newest)))
        if row is None or row.sequence != sequence:
            raise GymError(ErrorCode.NOT_FOUND, f"the ledger has no entry {sequence}")
        head = SignedHead.from_json(text) if text else None
        if head is None or head.size < sequence:
            raise GymError(
                ErrorCode.NOT_FOUND,
                f"no signed head of size {size} contains entry {sequence}",
                "request size 0, which is the newest head",
            )
        if head.size == sequence:
            return EntryProof(entry_of(row), head)
        with self._lock:
            self._grow(head.size)
            path = self._tree.inclusion(sequence - 1, head.size)
        return EntryProof(entry_of(row), head, tuple(path))

    def _grow(self, size: int) -> None:
        if self._tree.size < size:
            new = select(ledger.c.hash).where(ledger.c.sequence > self._tree.size)
            with self._database.reading() as tx:
                for entry_hash in tx.scalars(
                    new.where(ledger.c.sequence <= size).order_by(ledger.c.sequence)
                ):
                    self._tree.append(entry_hash)

    # ---- verification ----

    def check_heads(self) -> None:
        """Check quickly that no signed head was deleted; ``verify`` checks everything.

        Raises:
            GymError: ``STATE_CORRUPT`` if a head is missing.
        """
        with self._database.reading() as tx:
            stored = int(tx.scalar(select(func.count()).select_from(ledger_heads)) or 0)
            newest = int(tx.scalar(select(func.max(ledger_heads.c.size))) or 0)
            entries = int(tx.scalar(select(func.max(ledger.c.sequence))) or 0)
            signed = signed_heads(tx)
        if entries > newest:
            raise corrupt(f"no signed head covers entries {newest + 1} to {entries}")
        if stored != signed:
            raise corrupt(f"entry {newest} counts {counted(signed, 'signed head')}, but {stored} are stored")

    def verify(self) -> dict[str, int]:
        """Verify the chain, the heads and every table against the ledger; see ``gym_server.ledger.checks``."""
        return verify_database(self._database, self.public_key, self._anchor)
