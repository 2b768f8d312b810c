"""Answers that were taught in `play`: preferences of a base, in a file that `gym variant create` reads."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import append_lines, drop_torn_line, make_folder, write_atomically
from gym_fed.data.formats.base import BadRow
from gym_fed.data.formats.preference import Preference
from gym_fed.webui.workbench import MAX_ROWS, Workbench

FOLDER = "taught"
MAX_TAUGHT_ROWS = 10_000


class Taught:
    """The files of all bases, ``taught/NAME.jsonl`` below the workbench's folder."""

    def __init__(self, workbench: Workbench) -> None:
        self._workbench = workbench
        self._lock = threading.Lock()

    def file(self, base: str) -> Path:
        """Of a base, relative to the workbench's folder."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", base).strip("-.")[:60]
        if name != base:  # two bases never share a file
            name = f"{name}-{hashlib.sha256(base.encode()).hexdigest()[:8]}"
        return Path(FOLDER) / f"{name}.jsonl"

    def rows(self, base: str) -> dict[str, Any]:
        """``{file, total, rows}`` with the newest rows first, each with the ``id`` that removes it.

        Raises:
            GymError: ``DATA_INVALID`` for a line that is no preference.
        """
        lines = self._lines(base)
        newest = [(id_of(line), self._row(base, line)) for line in reversed(lines[-MAX_ROWS:])]
        return {
            "file": str(self.file(base)),
            "total": len(lines),
            "rows": [
                {"id": id, **{key: row[key] for key in ("prompt", "chosen", "rejected")}}
                for id, row in newest
            ],
        }

    def add(self, base: str, prompt: list[dict[str, str]], chosen: str, rejected: str) -> int:
        """Add a preference; returns how many there are now.

        Args:
            base: Whose answer is taught.
            prompt: The messages before the answer.
            chosen: The better answer.
            rejected: The other one.

        Raises:
            GymError: ``DATA_INVALID`` for what prefers nothing; ``QUOTA_EXCEEDED``.
        """
        alone = len(prompt) == 1 and prompt[0]["role"] == "user"
        row = {"prompt": prompt[0]["content"] if alone else prompt, "chosen": chosen, "rejected": rejected}
        try:
            Preference().read(row)
        except BadRow as error:
            raise GymError(ErrorCode.DATA_INVALID, f"this teaches nothing: {error}") from error
        with self._lock:
            file = self._path(base)
            make_folder(file.parent)
            if file.exists():
                drop_torn_line(file)
            count = len(self._lines(base))
            if count >= MAX_TAUGHT_ROWS:
                raise GymError(
                    ErrorCode.QUOTA_EXCEEDED, f"{self.file(base)} has {count} rows", "move it away"
                )
            append_lines(file, [json.dumps(row, ensure_ascii=False)])
        return count + 1

    def remove(self, base: str, id: str) -> int:
        """Remove a row; returns how many are left.

        Raises:
            GymError: ``NOT_FOUND``.
        """
        with self._lock:
            lines = self._lines(base)
            left = [line for line in lines if id_of(line) != id]
            if len(left) == len(lines):
                raise GymError(ErrorCode.NOT_FOUND, f"{self.file(base)} has no such row", "reload the page")
            write_atomically(self._path(base), "".join(f"{line}\n" for line in left).encode())
        return len(left)

    def _path(self, base: str) -> Path:
        return self._workbench.inside(str(self.file(base)))

    def _lines(self, base: str) -> list[str]:
        file = self._path(base)
        if not file.is_file():
            return []
        return [line for line in file.read_text(encoding="utf-8", errors="replace").split("\n") if line]

    def _row(self, base: str, line: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
            if isinstance(row, dict) and {"prompt", "chosen", "rejected"} <= row.keys():
                return row
        except (ValueError, RecursionError):
            pass
        raise GymError(
            ErrorCode.DATA_INVALID,
            f"{self.file(base)}: a line is no preference",
            "repair it, or move it away",
        )


def id_of(line: str) -> str:
    """What a row is removed by: its content, so that a page of before another change removes no other."""
    return hashlib.sha256(line.encode()).hexdigest()[:16]
