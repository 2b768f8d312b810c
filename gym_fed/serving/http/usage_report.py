"""Sum the usage log by caller, user and month, and remove a variant's name and its users from it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import lock, unlock

MAX_LINE_BYTES = 2**20
_PERSONAL = ("user", "safety_identifier", "metadata")
"""Fields of a line that come from the request and may name a person."""
FORGOTTEN = "removed"
"""The caller in lines of a removed variant."""


@dataclass(frozen=True)
class UsageSum:
    """The usage of one caller and user in one month.

    Attributes:
        month: The month in UTC, ``YYYY-MM``.
        key: Name of the caller's key.
        user: The request's ``user``; empty if it had none.
        requests: Number of requests.
        prompt_tokens: Tokens of the prompts.
        completion_tokens: Tokens of the answers.
    """

    month: str
    key: str
    user: str
    requests: int
    prompt_tokens: int
    completion_tokens: int

    @property
    def tokens(self) -> int:
        """Tokens of prompts and answers together."""
        return self.prompt_tokens + self.completion_tokens

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dictionary."""
        return {**asdict(self), "tokens": self.tokens}


@dataclass(frozen=True)
class UsageReport:
    """The sums of a usage log, oldest month first, and the number of lines that are not usage."""

    sums: tuple[UsageSum, ...]
    unreadable: int


def sum_usage(path: Path, month: str | None = None) -> UsageReport:
    """Sum a usage log.

    Args:
        path: The file; read line by line.
        month: Only this month, ``YYYY-MM``; None for all.

    Raises:
        GymError: ``FILE_NOT_FOUND``.
    """
    sums: dict[tuple[str, str, str], list[int]] = {}
    unreadable = 0
    with _opened(path, "rb") as file:
        for _, data in _lines(file):
            try:
                line = json.loads(data)
                used = time.strftime("%Y-%m", time.gmtime(line["at"]))
                counts = (1, _count(line["prompt_tokens"]), _count(line["completion_tokens"]))
                caller = (used, str(line["key"]), str(line.get("user") or ""))
            except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError, RecursionError):
                unreadable += 1
                continue
            if month is None or used == month:
                known = sums.setdefault(caller, [0, 0, 0])
                for place, count in enumerate(counts):
                    known[place] += count
    return UsageReport(
        tuple(UsageSum(*caller, *counts) for caller, counts in sorted(sums.items())), unreadable
    )


def forget_variant(path: Path, variant: str) -> int:
    """Remove a variant's name, its callers and their users from a usage log; return the number of changed lines.

    Time, version and tokens stay, since royalties of the base's contributors are computed from them. Each line keeps
    its length, filled up with spaces. So a server may append to the same file meanwhile, and a crash loses no line.

    Raises:
        GymError: ``FILE_NOT_FOUND``.
    """
    with _opened(path, "r+b") as file:
        lock(file, wait=True)
        try:
            changed = [
                (offset, shorter.ljust(len(data.removesuffix(b"\n"))))
                for offset, data in _lines(file)
                if (shorter := _forgotten(data, variant)) is not None
            ]
            for offset, line in changed:
                file.seek(offset)
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
        finally:
            unlock(file)
    return len(changed)


def _forgotten(data: bytes, variant: str) -> bytes | None:
    """Return a line without the variant and its users, at most as long as before; None for a line of another model."""
    try:
        line = json.loads(data)
        base, colon, name = str(line["model"]).rpartition(":")
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not colon or name != variant:
        return None
    line["model"], line["key"] = base, FORGOTTEN
    for field in _PERSONAL:
        line.pop(field, None)
    shorter = json.dumps(line, ensure_ascii=True).encode()
    if len(shorter) > len(data.removesuffix(b"\n")):  # a caller whose name is shorter than ``FORGOTTEN``
        line["key"] = ""
        shorter = json.dumps(line, ensure_ascii=True).encode()
    return shorter


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield offset and bytes of each line that is not empty; a longer one is cut into several."""
    while True:
        offset = file.tell()
        data = file.readline(MAX_LINE_BYTES)
        if not data:
            return
        if data.strip():
            yield offset, data


def _opened(path: Path, mode: str) -> IO[bytes]:
    try:
        return path.open(mode)
    except OSError as error:
        raise GymError(
            ErrorCode.FILE_NOT_FOUND,
            f"{path}: {error.strerror}",
            "use the file of usage_log in serving.yaml",
        ) from error


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a token count")
    return value
