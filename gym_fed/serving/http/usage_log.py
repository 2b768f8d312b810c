"""The usage log: a JSON line per request, read by `gym-server ledger attribute --usage`.

``version`` is the digest of the base's weights. A base that was exported from a hub's version has that version's
digest, so the hub finds whom to credit. Use of a variant counts as use of its base; the variant is also named.
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
from dataclasses import dataclass
from pathlib import Path

from gym_fed.core.file_lock import lock, unlock
from gym_fed.core.files import drop_torn_line
from gym_fed.core.portable import O_BINARY

_log = logging.getLogger(__name__)


class UsageLog:
    """Appends complete lines or nothing, so that several servers can share a file.

    If a line cannot be written, such as when the disk is full, the request still succeeds: the line is counted, and
    written to the process's log, from which it can be appended by hand.

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
        """Append one request, unless it used no tokens. A failed write is counted and logged, not raised."""
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
        url: The kind of request.
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
