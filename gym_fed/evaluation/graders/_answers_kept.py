"""Replies of a judge, kept in SQLite by the digest of the request."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import threading
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError


class AnswersKept:
    """A mapping from requests to texts, safe for threads and for several processes that share the file.

    Args:
        path: The file, made with its folders if need be; None keeps the answers in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.Lock()
        try:
            if path is not None:
                path.expanduser().parent.mkdir(parents=True, exist_ok=True)
            self._store = sqlite3.connect(
                ":memory:" if path is None else path.expanduser(), timeout=30, check_same_thread=False
            )
            self._store.execute("PRAGMA journal_mode=WAL")
            self._store.execute(
                "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)"
            )
            self._store.commit()
        except (OSError, sqlite3.Error) as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"judge: cache {path} cannot be used: {error}",
                "delete the file or name another",
            ) from error

    def get(self, request: dict[str, Any]) -> str | None:
        """What was said to the same request before."""
        with self._lock:
            found = self._store.execute(
                "SELECT answer FROM answers WHERE key = ?", (key(request),)
            ).fetchone()
        return None if found is None else str(found[0])

    def put(self, request: dict[str, Any], answer: str) -> None:
        """Keep an answer."""
        with self._lock:
            self._store.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key(request), answer))
            self._store.commit()

    def close(self) -> None:
        """Close the file."""
        self._store.close()


def key(request: dict[str, Any]) -> str:
    """sha256 of the request as canonical JSON."""
    return hashlib.sha256(json.dumps(request, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
