"""The usage log: one JSON line per request, for reports and for `gym-server ledger attribute --usage`.

``version`` is the digest of the base's weights. A base that was exported from a version of a hub has the digest of that
version, by which the hub finds the contributors to credit. Use of a variant counts as use of its base.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.file_lock import lock, unlock
from gym_fed.core.files import drop_torn_line
from gym_fed.core.portable import O_BINARY

_log = logging.getLogger(__name__)


class UsageLog:
    """Appends only complete lines, so that several servers can share a file.

    If a line cannot be written, for example because the disk is full, the request still succeeds. The line is then
    counted and written to the process's log, from which it can be appended by hand.

    Args:
        path: The file; created with mode 0600 if missing.
        version: Digest of the base, ``sha256:<hex>``.

    Attributes:
        lost: Lines that could not be written.
    """

    def __init__(self, path: Path, version: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.lost = 0
        self._path = path
        self._version = version
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | O_BINARY
        self._file = os.open(path, flags, 0o600)
        with self._alone():
            drop_torn_line(path)

    def write(self, use: Use) -> None:
        """Append one request if it used tokens; a failed write is counted and logged, not raised."""
        tokens = use.prompt_tokens + use.completion_tokens
        if not tokens:
            return
        line = {
            "at": round(time.time(), 3),
            "version": self._version,
            "model": use.model,
            "tokens": tokens,
            "prompt_tokens": use.prompt_tokens,
            "completion_tokens": use.completion_tokens,
            "key": use.caller,
            "url": use.url,
        }
        if use.end_user is not None:
            line["user"] = use.end_user
        if use.safety_identifier is not None:
            line["safety_identifier"] = use.safety_identifier
        if use.metadata:
            line["metadata"] = dict(use.metadata)
        text = json.dumps(line, ensure_ascii=True)
        try:
            with self._alone():
                self._append(f"{text}\n".encode())
        except OSError as error:
            self.lost += 1
            _log.error("cannot append to %s (%s): %s", self._path, error.strerror, text)

    def _append(self, data: bytes) -> None:
        size = os.fstat(self._file).st_size
        if os.write(self._file, data) < len(data):
            os.ftruncate(self._file, size)  # a partial line would make the file unreadable
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Lock the file against other threads and servers."""
        with self._lock:
            lock(self._file, wait=True)
            try:
                yield
            finally:
                unlock(self._file)

    def close(self) -> None:
        os.close(self._file)


@dataclass(frozen=True)
class Use:
    """The usage of one request.

    Attributes:
        url: The path of the endpoint, such as ``/v1/embeddings``.
        model: The requested name.
        caller: The name of the caller.
        end_user: The request's ``user``, if any.
        safety_identifier: The request's ``safety_identifier``, if any.
        metadata: The request's ``metadata``, if any.
        prompt_tokens: Tokens of the prompts.
        completion_tokens: Tokens of the answers, including cancelled ones.
    """

    url: str
    model: str
    caller: str
    end_user: str | None
    prompt_tokens: int
    completion_tokens: int
    safety_identifier: str | None = None
    metadata: Mapping[str, str] | None = None


OnUse = Callable[[Use], None]


MAX_LINE_BYTES = 2**20
_PERSONAL = ("user", "safety_identifier", "metadata")
"""Fields of a line that come from the request and may name a person."""
FORGOTTEN = "removed"
"""Name that replaces the caller in lines of a removed variant."""


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
    """The sums of a usage log, oldest month first, and the number of unreadable lines."""

    sums: tuple[UsageSum, ...]
    unreadable: int


def sum_usage(path: Path, month: str | None = None) -> UsageReport:
    """Sum a usage log.

    Args:
        path: The file; read line by line.
        month: Sum only this month, ``YYYY-MM``; None for all.

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

    Time, version and tokens stay, since they determine the royalties of the base's contributors. Lines are padded with
    spaces to their previous length, so that a server may append to the file concurrently, and a crash loses no line.

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
    """Return a line without the variant and its users, no longer than before; None for a line of another model."""
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
    if len(shorter) > len(data.removesuffix(b"\n")):  # the caller's name is shorter than ``FORGOTTEN``
        line["key"] = ""
        shorter = json.dumps(line, ensure_ascii=True).encode()
    return shorter


def _lines(file: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the offset and bytes of each nonempty line; a line over ``MAX_LINE_BYTES`` is split into several."""
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
            "use the file that usage_log sets in serving.yaml",
        ) from error


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("not a token count")
    return value
