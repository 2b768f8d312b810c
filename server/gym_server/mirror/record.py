"""The in-memory index of a mirror's verified ledger: entry offsets in the file, heads and the Merkle tree."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.ledger.export import LedgerCheck
from gym_fed.trust.ledger.heads import EntryProof, SignedHead
from gym_fed.trust.ledger.merkle import Tree


class MirrorRecord:
    """Reads a growing ledger file and verifies every line before it is served.

    Args:
        path: The file, an exported ledger.
        public_key: Ledger key of the hub.
        visit: Called with every verified entry.
    """

    def __init__(self, path: Path, public_key: bytes, visit: Callable[[Entry], None]) -> None:
        self._path, self._visit = path, visit
        self._check = LedgerCheck(public_key)
        self._offset = 0
        self._at = array("Q")  # offset of each entry's line
        self._tree = Tree()
        self.heads: list[SignedHead] = []

    @property
    def size(self) -> int:
        """Number of entries under a verified head."""
        return self.heads[-1].size if self.heads else 0

    def read(self, entries: int) -> None:
        """Read further lines, up to a head that covers ``entries`` entries.

        Raises:
            GymError: ``STATE_CORRUPT`` if a line does not continue the chain, or the file ends before that head.
        """
        with self._path.open("rb") as file:
            file.seek(self._offset)
            while self.size < entries:
                line = file.readline()
                if not line.endswith(b"\n"):
                    raise GymError(
                        ErrorCode.STATE_CORRUPT,
                        f"{self._path} ends at entry {len(self._at)} of {entries}",
                        "delete the file, and start the mirror again",
                    )
                value = json.loads(line)
                if "head" in value:
                    head = SignedHead.from_dict(value)
                    self._check.head(head)
                    self.heads.append(head)
                elif "sequence" in value:
                    entry = Entry.from_dict(value)
                    self._check.entry(entry)
                    self._at.append(self._offset)
                    self._tree.append(entry.hash)
                    self._visit(entry)
                self._offset += len(line)

    def entries(self, first: int) -> Iterator[Entry]:
        """Yield the entries under the newest head, starting with sequence number ``first``."""
        last = self.size
        if first > last:
            return
        with self._path.open("rb") as file:
            file.seek(self._at[first - 1])
            while first <= last:
                value = json.loads(file.readline())
                if "head" not in value:
                    yield Entry.from_dict(value)
                    first += 1

    def proof(self, sequence: int, size: int) -> EntryProof:
        """Return the proof of an entry under the head of the given size; 0 for the newest head.

        Raises:
            GymError: ``NOT_FOUND`` if the mirror does not have the entry or the head.
        """
        signed = next((h for h in reversed(self.heads) if not size or h.size == size), None)
        if signed is None or not 1 <= sequence <= signed.size:
            raise GymError(
                ErrorCode.NOT_FOUND, f"this mirror has no entry {sequence} under a head of size {size}"
            )
        entry = next(self.entries(sequence))
        path = () if signed.size == sequence else tuple(self._tree.inclusion(sequence - 1, signed.size))
        return EntryProof(entry, signed, path)
