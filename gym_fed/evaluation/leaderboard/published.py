"""A leaderboard in a registry: one object per line, and the record of each submission.

A line is created under its number and never replaced, so that two people who submit at once get two lines. Anyone with
write access to the registry may add lines; each is signed, and the local file is an append-only copy.

::

    leaderboard/000001.json                  a line
    leaderboard/records/HASH/record.json     the record of the submission with this line hash
    leaderboard/records/HASH/samples.jsonl   its samples
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256, write_atomically
from gym_fed.core.text import counted
from gym_fed.data.objects import Objects
from gym_fed.evaluation.leaderboard.board import (
    MAX_BYTES,
    MAX_LINE_BYTES,
    MAX_LINES,
    BoardRow,
    Leaderboard,
    records_folder,
)
from gym_fed.evaluation.leaderboard.lines import Line, Reproduction, Submission, corrupt
from gym_fed.evaluation.records.document import paths_of, samples_path
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.ledger.entries import canonical_text

MAX_RECORD_BYTES = 32 << 20
"""Maximum size in bytes of a published record, and of its samples."""
_FOLDER = "leaderboard"
_LINE = re.compile(r"(\d{6})\.json", re.ASCII)


class PublishedLeaderboard(Leaderboard):
    """The board of a registry, with a copy in a file.

    Args:
        path: The copy. It is extended with the registry's new lines; a registry that lacks one of its lines, or has
            changed one, is refused.
        registry: The registry's folder or URL.
        head: As for ``Leaderboard``.

    Raises:
        GymError: ``STATE_CORRUPT`` naming the registry, for lines that do not continue the copy; errors of
            ``Leaderboard``.
    """

    def __init__(self, path: str | Path, registry: str | Path, *, head: str | None = None) -> None:
        self._objects = Objects(registry)
        self._pull(Path(path))
        super().__init__(path, head=head)

    def add(self, content: Submission | Reproduction, key: SigningKey) -> Line:
        """Sign a line, publish it with its record, and extend the copy. Raises the errors of ``Leaderboard.add``."""
        while True:
            board = Leaderboard(self.path)
            before = board.head
            line = board.signed(content, key)
            if isinstance(content, Submission):
                self._publish_record(content, line.entry.hash)
            text = canonical_text(line.entry.to_dict()) + "\n"
            if self._objects.create(f"{_FOLDER}/{line.entry.sequence:06}.json", text.encode()):
                break
            self._pull(self.path)  # someone else's line has this number
            if Leaderboard(self.path).head == before:
                raise corrupt(f"{self._objects.url}/{_FOLDER}: line {line.entry.sequence} is not a file")
        self._pull(self.path)
        self._adopt(Leaderboard(self.path))
        return line

    def fetch_record(self, row: BoardRow) -> None:
        """Download the record of a submission next to the copy, unless it exists.

        Raises:
            GymError: ``FILE_NOT_FOUND`` if the registry lacks it; ``HASH_MISMATCH`` if its samples differ from
                those that were submitted, in which case nothing is written; ``TOO_LARGE``.
        """
        submission, digest = row.submission, row.line.entry.hash
        if any(
            samples_path(path).is_file() and file_sha256(samples_path(path)) == submission.results
            for path in paths_of(submission.record, records_folder(self.path))
        ):
            return
        folder = records_folder(self.path) / "data" / "registry" / digest / submission.record
        document = folder / f"{submission.record}.json"
        for name, target in (("samples.jsonl", samples_path(document)), ("record.json", document)):
            try:
                data = self._objects.read(f"{_FOLDER}/records/{digest}/{name}", MAX_RECORD_BYTES)
            except FileNotFoundError:
                raise GymError(
                    ErrorCode.FILE_NOT_FOUND,
                    f"{self._objects.url}: line {row.line.entry.sequence} has no {name}",
                    "ask its submitter for the record",
                ) from None
            if target != document and (digest_here := hashlib.sha256(data).hexdigest()) != submission.results:
                raise GymError(
                    ErrorCode.HASH_MISMATCH,
                    f"{self._objects.url}: the samples of line {row.line.entry.sequence} have sha256 "
                    f"{digest_here}, but the submission has {submission.results}",
                    "ask its submitter for the record",
                )
            write_atomically(target, data)

    def _publish_record(self, submission: Submission, digest: str) -> None:
        (document,) = (
            path
            for path in paths_of(submission.record, records_folder(self.path))
            if samples_path(path).is_file() and file_sha256(samples_path(path)) == submission.results
        )
        for name, file in (("samples.jsonl", samples_path(document)), ("record.json", document)):
            if file.stat().st_size > MAX_RECORD_BYTES:
                raise GymError(
                    ErrorCode.TOO_LARGE,
                    f"{file}: more than {counted(MAX_RECORD_BYTES, 'byte')}, the limit for a published record",
                    "evaluate with fewer rows (--num), or publish the board as a file",
                )
            self._objects.create(f"{_FOLDER}/records/{digest}/{name}", file.read_bytes())

    def _pull(self, path: Path) -> None:
        """Extend the copy with the registry's lines after its last one, which the registry must have too."""
        numbers = sorted(
            int(match[1]) for name in self._objects.names(_FOLDER) if (match := _LINE.fullmatch(name))
        )
        if numbers != list(range(1, len(numbers) + 1)) or len(numbers) > MAX_LINES:
            raise corrupt(f"{self._objects.url}/{_FOLDER}: its lines are not numbered consecutively from 1")
        last = Leaderboard.opened_to_add(path).last
        known = last.sequence if last else 0
        if known > len(numbers):
            raise corrupt(f"{self._objects.url} has {counted(len(numbers), 'line')}, but {path} has {known}")
        if last and self._line(known) != (canonical_text(last.to_dict()) + "\n").encode():
            raise corrupt(
                f"{self._objects.url}: its line {known} differs from {path}: it is a different board"
            )
        if known < len(numbers):
            lines, size = list[bytes](), path.stat().st_size if last else 0
            for number in numbers[known:]:
                lines.append(self._line(number))
                size += len(lines[-1])
                if size > MAX_BYTES:
                    raise GymError(
                        ErrorCode.TOO_LARGE,
                        f"{self._objects.url}/{_FOLDER}: over the limit of {counted(MAX_BYTES, 'byte')}",
                        "start another leaderboard",
                    )
            Leaderboard(path).extend(lines)

    def _line(self, number: int) -> bytes:
        return self._objects.read(f"{_FOLDER}/{number:06}.json", MAX_LINE_BYTES)
