"""The output of `gym batch`: appended a whole line at a time, so that the same command goes on after a kill.

Beside ``out.jsonl`` stands ``out.jsonl.batch.json``, which says of which input and which model the answers are.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any, Self

from gym_fed.errors import ErrorCode, GymError
from gym_fed.files import drop_torn_line, write_atomically

SYNC_SECONDS = 2.0
"""Lines reach the file at once, and the disk at most so much later: a power cut may cost that much work."""


class BatchOutput:
    """Where answers go; one process at a time.

    Args:
        path: Of the answers, and of failures where ``errors`` is None.
        errors: Of failures.
        belongs_to: Input and model, as JSON values; an output of another run is refused, unless it has no line yet.
        custom_ids: Of the input.

    Attributes:
        done: Ids that have a line already.

    Raises:
        GymError: ``FILE_EXISTS`` for answers of another run, ``STATE_CORRUPT`` for lines that no run wrote,
            ``STATE_LOCKED`` when another process writes there.
    """

    def __init__(
        self, path: Path, errors: Path | None, *, belongs_to: dict[str, Any], custom_ids: frozenset[str]
    ) -> None:
        self.path = path
        self.errors = errors
        self.done: set[str] = set()
        self.num_failed = 0
        self._description = path.with_name(f"{path.name}.batch.json")
        self._files: list[int] = []
        self._synced = time.monotonic()
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            begins = self._claim(belongs_to)
            self._answers = self._open(path, custom_ids)
            self._failures = self._open(errors, custom_ids) if errors is not None else self._answers
            if begins and not self.done:
                self._describe(belongs_to)
            elif begins:  # it has written since
                self._require_same(self._described(), belongs_to)
        except BaseException:
            self.close()
            raise

    def write(self, line: dict[str, Any], *, failed: bool) -> None:
        """Append; after this a kill of the process does not lose the line."""
        data = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        file = self._failures if failed else self._answers
        while data:
            data = data[os.write(file, data) :]
        self.done.add(line["custom_id"])
        self.num_failed += failed
        if time.monotonic() - self._synced > SYNC_SECONDS:
            self._sync()

    def pin(self, more: dict[str, Any]) -> None:
        """Add to what the answers belong to; what is known once the model is loaded.

        Raises:
            GymError: ``FILE_EXISTS`` where answers of another model stand already.
        """
        known = self._described()
        if more.keys() <= known.keys() and self.done:
            self._require_same(known, {**known, **more})
        else:
            self._describe({**known, **more})

    def close(self) -> None:
        """What was written is on the disk."""
        if self._files:
            self._sync()
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _claim(self, belongs_to: dict[str, Any]) -> bool:
        """Make the description, or refuse what belongs to another run.

        Returns:
            Whether another run left its description and no line: it is replaced once the files are locked.
        """
        if self._description.exists():
            known = self._described()
            if not self._has_lines() and any(known.get(key) != belongs_to[key] for key in belongs_to):
                return True
            self._require_same(known, belongs_to)
            return False
        for path in (self.path, self.errors):
            if path is not None and path.exists():
                raise GymError(
                    ErrorCode.FILE_EXISTS, f"{path}: exists, and no batch wrote it", "name another file"
                )
        self._describe(belongs_to)
        return False

    def _has_lines(self) -> bool:
        return any(
            path is not None and path.exists() and path.stat().st_size for path in (self.path, self.errors)
        )

    def _require_same(self, known: dict[str, Any], now: dict[str, Any]) -> None:
        for key in now:
            if known.get(key) != now[key]:
                raise GymError(
                    ErrorCode.FILE_EXISTS,
                    f"{self.path} belongs to another run: {key} was {known.get(key)!r}, and is {now[key]!r}",
                    f"name another output, or remove {self.path} and {self._description}",
                )

    def _described(self) -> dict[str, Any]:
        try:
            known = json.loads(self._description.read_text(encoding="utf-8"))
        except ValueError:
            known = None
        if not isinstance(known, dict):
            raise GymError(
                ErrorCode.STATE_CORRUPT, f"{self._description}: not a JSON object", "name another output"
            )
        return known

    def _describe(self, belongs_to: dict[str, Any]) -> None:
        text = json.dumps(belongs_to, indent=2, sort_keys=True) + "\n"
        write_atomically(self._description, text.encode())

    def _open(self, path: Path, custom_ids: frozenset[str]) -> int:
        """Lock the file, cut off a torn last line, and note what it has."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._files.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise GymError(
                ErrorCode.STATE_LOCKED,
                f"{path}: another process writes there",
                "wait for it, or name another",
            ) from error
        drop_torn_line(path)
        with path.open("rb") as lines:
            for number, raw in enumerate(lines, start=1):
                try:
                    line = json.loads(raw)
                    custom_id, response = line["custom_id"], line["response"]
                    status = response["status_code"]
                except (ValueError, KeyError, TypeError) as error:
                    raise GymError(
                        ErrorCode.STATE_CORRUPT, f"{path}: line {number} is not an answer", "remove that line"
                    ) from error
                if custom_id not in custom_ids or custom_id in self.done:
                    what = "is answered twice" if custom_id in self.done else "is not in the input"
                    raise GymError(
                        ErrorCode.STATE_CORRUPT,
                        f"{path}: line {number}: {custom_id!r} {what}",
                        "remove that line",
                    )
                self.done.add(custom_id)
                self.num_failed += status != 200
        return file

    def _sync(self) -> None:
        for file in self._files:
            os.fsync(file)
        self._synced = time.monotonic()
