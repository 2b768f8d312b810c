"""A file with the newest signed head, which reveals that the database was replaced by an older copy."""

from __future__ import annotations

import json
from pathlib import Path

from sqlalchemy import Connection, select

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.trust.ledger.heads import SignedHead
from gym_fed.trust.ledger.restored import KIND, SignedRestored
from gym_server.ledger.rows import hash_of
from gym_server.store.tables import ledger


class Anchor:
    """The file with the newest head, written after the transaction that signed it.

    Args:
        path: Path of the file; None disables storing and checking.
        public_key: The hub's public key, 32 bytes.
    """

    def __init__(self, path: Path | None, public_key: bytes) -> None:
        self._path = path
        self._key = public_key
        self._checked = False
        self._superseded: SignedHead | None = None

    def keep(self, head: SignedHead | None) -> None:
        """Store a head unless the file has a later one."""
        if self._path is None or head is None:
            return
        before = self.read()
        if before is None or before.size < head.size or self._superseded == before:
            write_atomically(self._path, head.to_json().encode("utf-8"), mode=0o600)
            self._superseded = None

    def check(self, tx: Connection, signed: int) -> None:
        """Compare the file with the ledger once per process, in a write transaction, so that no head is signed
        meanwhile.
        """
        if not self._checked:
            self.compare(tx, signed, self.read())
            self._checked = True

    def compare(self, tx: Connection, signed: int, head: SignedHead | None) -> None:
        """Check that the ledger, with ``signed`` signed entries, still contains all entries under ``head``.

        Raises:
            GymError: ``STATE_CORRUPT`` if the ledger ends earlier, or has a different entry at that size.
        """
        if head is None:
            return
        head.verify(self._key)
        found = hash_of(tx, head.size)
        if head.size > signed or found != head.head.hash:
            lost = [said.statement.lost_head for _, said in restored_entries(tx) if said.covers(head)]
            if any(known is not None and head.size <= known.size for known in lost):
                self._superseded = head  # the hub was killed before the file was written
                return
            what = "ends before it" if head.size > signed else "has a different entry at that position"
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"ledger: the head of entry {head.size} was signed and is in {self._path}; the database {what}",
                "the database is an older copy, or was changed. `gym-server restore --fork --dir HUB` signs a "
                "statement that the hub continues from this copy; every contributor must accept it",
            )

    def supersede(self) -> None:
        """Allow the next head to replace the file's, after the hub has signed that it continues from an older state."""
        self._superseded, self._checked = self.read(), True

    def read(self) -> SignedHead | None:
        """Return the head in the file; a database snapshot that is taken later includes that head."""
        if self._path is None or not self._path.exists():
            return None
        return SignedHead.from_json(self._path.read_text(encoding="utf-8"))


def restored_entries(tx: Connection) -> list[tuple[int, SignedRestored]]:
    """Return the sequence number and statement of every entry of kind ``restored``."""
    rows = tx.execute(
        select(ledger.c.sequence, ledger.c.body).where(ledger.c.kind == KIND).order_by(ledger.c.sequence)
    )
    return [(row.sequence, SignedRestored.from_dict(json.loads(row.body))) for row in rows]
