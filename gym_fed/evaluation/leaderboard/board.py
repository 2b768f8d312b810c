"""Read, verify and extend a leaderboard file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import lock
from gym_fed.core.files import append_lines, drop_torn_line, full_disk_named, make_folder
from gym_fed.core.text import plain
from gym_fed.evaluation.leaderboard.lines import (
    Line,
    Reproduction,
    Submission,
    checked_line,
    corrupt,
    sign_line,
)
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.ledger.entries import Chain, Entry, canonical_text, parsed

MAX_LINE_BYTES = 1 << 20
MAX_LINES = 100_000
MAX_BYTES = 256 << 20
MIN_SAMPLES = 16
"""Minimum number of samples of a reproduction; all samples if the submission has fewer."""


@dataclass
class BoardRow:
    """A submission with its reproductions.

    Attributes:
        reproduced: Lines of keys that obtained the same results.
        differs: Lines of keys that obtained different results.
    """

    line: Line
    reproduced: list[Line] = field(default_factory=list)
    differs: list[Line] = field(default_factory=list)

    @property
    def submission(self) -> Submission:
        """The submission of the line."""
        assert isinstance(self.line.content, Submission)
        return self.line.content

    @property
    def status(self) -> str:
        """``self-reported``, or the number of keys that reproduced it and that failed to."""
        words = [
            f"{word} by {len(lines)}"
            for word, lines in (("reproduced", self.reproduced), ("disputed", self.differs))
            if lines
        ]
        return ", ".join(words) or "self-reported"

    def facts(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dictionary."""
        return {
            "line": self.line.entry.sequence,
            "hash": self.line.entry.hash,
            "signer": self.line.signer,
            "status": self.status,
            "reproduced_by": [line.signer for line in self.reproduced],
            "disputed_by": [line.signer for line in self.differs],
            **self.submission.model_dump(mode="json"),
        }

    def require_another(self, public_key: bytes) -> None:
        """Refuse a key that submitted or already re-ran the line.

        Raises:
            GymError: ``PERMISSION_DENIED`` for the submitter's own key, ``REPLAYED`` for one that re-ran it.
        """
        sequence = self.line.entry.sequence
        if public_key == self.line.public_key:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"line {sequence} was signed with this key; a result must be reproduced with a different key",
                "ask someone else to verify it, with their own key",
            )
        if any(public_key == line.public_key for line in (*self.reproduced, *self.differs)):
            raise GymError(
                ErrorCode.REPLAYED, f"this key has already verified line {sequence}; a key counts only once"
            )


class Leaderboard:
    """The verified lines of a board.

    Args:
        path: Path of ``leaderboard.jsonl``; a missing file is an empty board.
        head: A line hash seen earlier as the board's last; a board without it was truncated, or is a different board.

    Attributes:
        path: The board's file.
        board_rows: Submissions by line hash, in the order of their lines.

    Raises:
        GymError: ``STATE_CORRUPT`` or ``SIGNATURE_INVALID`` naming file and line; ``TOO_LARGE``.
    """

    def __init__(self, path: str | Path, *, head: str | None = None) -> None:
        self.path = Path(path)
        self.board_rows: dict[str, BoardRow] = {}
        self.last: Entry | None = None
        self._chain = Chain()
        seen = head is None
        for raw in self._raw_lines():
            line = self._add_raw(raw)
            seen = seen or line.entry.hash.startswith(head or "")
        if not seen:
            raise corrupt(
                f"{self.path}: no line has the hash {plain(head, 70)}: lines are missing at the end"
            )

    @property
    def head(self) -> str:
        """The hash of the last line; empty for an empty board."""
        return self.last.hash if self.last else ""

    def named(self, reference: str) -> BoardRow:
        """Return a submission by line number or by the beginning of its hash.

        Raises:
            GymError: ``FILE_NOT_FOUND`` for no match; ``USAGE`` for several.
        """
        matches = [
            row
            for digest, row in self.board_rows.items()
            if str(row.line.entry.sequence) == reference
            or (len(reference) >= 6 and digest.startswith(reference))
        ]
        if not matches:
            raise GymError(
                ErrorCode.FILE_NOT_FOUND,
                f"{self.path}: no submission {plain(reference, 70)}",
                "use the number of its line: gym leaderboard show",
            )
        if len(matches) > 1:
            raise GymError(
                ErrorCode.USAGE,
                f"{len(matches)} submissions match {reference}",
                "use more characters of the hash",
            )
        return matches[0]

    @staticmethod
    def opened_to_add(path: str | Path) -> Leaderboard:
        """Open a board for adding lines, removing one truncated by a crash."""
        with _locked(Path(path)):
            _require_size(Path(path))
            drop_torn_line(Path(path))
            return Leaderboard(path)

    def add(self, content: Submission | Reproduction, key: SigningKey) -> Line:
        """Sign a line and append it durably.

        Raises:
            GymError: ``REPLAYED`` for a record that the key already submitted, or a submission that it already
                verified; ``PERMISSION_DENIED`` for a key that reproduces its own submission; as the constructor, for
                lines that others added meanwhile.
        """
        with _locked(self.path):
            current = self._reopened()
            line = current.signed(content, key)
            append_lines(self.path, [canonical_text(line.entry.to_dict())])
        self._adopt(current)
        return line

    def signed(self, content: Submission | Reproduction, key: SigningKey) -> Line:
        """Return the signed line that would follow, which is not written. Raises the errors of ``add``."""
        line = sign_line(content, key, self.last)
        self._add_verified(line)
        return line

    def extend(self, lines: Sequence[bytes]) -> None:
        """Verify signed lines, then append them; raises the constructor's errors."""
        with _locked(self.path):
            current = self._reopened()
            for raw in lines:
                current._add_raw(raw)
            append_lines(self.path, [raw[:-1].decode("utf-8") for raw in lines])
        self._adopt(current)

    def fetch_record(self, row: BoardRow) -> None:
        """Do nothing: the records of a board that is a file are published with it."""

    def _reopened(self) -> Leaderboard:
        _require_size(self.path)
        drop_torn_line(self.path)
        return Leaderboard(self.path)

    def _adopt(self, board: Leaderboard) -> None:
        self.board_rows, self.last, self._chain = board.board_rows, board.last, board._chain

    def _raw_lines(self) -> Iterator[bytes]:
        """Yield the lines of the file."""
        if not self.path.is_file():
            return
        _require_size(self.path)
        with self.path.open("rb") as file:
            while raw := file.readline(MAX_LINE_BYTES + 1):
                yield raw

    def _add_raw(self, raw: bytes) -> Line:
        """Add a line after checking its form, chain and signature."""
        number = self.last.sequence + 1 if self.last else 1
        where = f"{self.path}, line {number}"
        if len(raw) > MAX_LINE_BYTES or number > MAX_LINES:
            most = f"{MAX_LINE_BYTES} bytes per line, {MAX_LINES} lines"
            raise GymError(ErrorCode.TOO_LARGE, f"{where}: exceeds the limits of a leaderboard: {most}")
        try:
            entry = _entry(raw)
            line = checked_line(entry, self._chain.add(entry))
        except GymError as error:
            raise GymError(error.code, f"{where}: {error.message}", error.hint) from error
        self._add_verified(line)
        return line

    def _add_verified(self, line: Line) -> None:
        """Add a verified line, checking it against those before it."""
        where = f"{self.path}, line {line.entry.sequence}"
        if isinstance(line.content, Submission):
            if any(self._is_same(line, other) for other in self.board_rows.values()):
                raise GymError(
                    ErrorCode.REPLAYED, f"{where}: this key has submitted {line.content.record} before"
                )
            self.board_rows[line.entry.hash] = BoardRow(line)
        else:
            self._count(line, line.content, where)
        self.last = line.entry

    def _is_same(self, line: Line, other: BoardRow) -> bool:
        assert isinstance(line.content, Submission)
        return (
            other.line.public_key == line.public_key
            and other.submission.record == line.content.record
            and other.submission.model_name == line.content.model_name
        )

    def _count(self, line: Line, reproduction: Reproduction, where: str) -> None:
        row = self.board_rows.get(reproduction.line)
        if row is None:
            raise corrupt(
                f"{where}: reproduces {reproduction.line[:12]}, which is not the hash of an earlier line"
            )
        try:
            row.require_another(line.public_key)
        except GymError as error:
            raise GymError(error.code, f"{where}: {error.message}", error.hint) from None
        total = row.submission.num_samples
        if (
            not min(MIN_SAMPLES, total) <= reproduction.num_samples <= total
            or reproduction.parted > reproduction.num_samples
        ):
            raise corrupt(f"{where}: re-ran {reproduction.num_samples} of {total} samples")
        (row.reproduced if reproduction.outcome == "reproduced" else row.differs).append(line)


def records_folder(board: Path) -> Path:
    """Return the folder of a board's records, next to the board."""
    return board.with_name(f"{board.stem}.records")


def _require_size(path: Path) -> None:
    if path.is_file() and path.stat().st_size > MAX_BYTES:
        raise GymError(ErrorCode.TOO_LARGE, f"{path}: exceeds the limit of a leaderboard: {MAX_BYTES} bytes")


def _entry(raw: bytes) -> Entry:
    if not raw.endswith(b"\n"):
        raise corrupt("is truncated")
    try:
        value = parsed(raw[:-1].decode("utf-8"))
    except UnicodeDecodeError:
        value = NotImplemented
    if not isinstance(value, dict):
        raise corrupt("is not canonical JSON")
    return Entry.from_dict(value)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the board for adding lines, using a lock file next to it."""
    make_folder(path.absolute().parent)
    with full_disk_named(path):
        descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock(descriptor, wait=True)
        yield
    finally:
        os.close(descriptor)
