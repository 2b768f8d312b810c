"""The usage log: a JSON line for each request, as `gym-server ledger attribute --usage` reads them.

``version`` is the digest of the base's weights. A base that was exported from a hub's version has that version's
digest, so the hub finds whom to credit; a variant counts as use of the base that it stands on, and is named beside.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

from gym_fed.files import drop_torn_line
from gym_fed.serving.openai.service import Use


class UsageLog:
    """Appends; a line is written in one piece, so that several servers may share a file.

    Args:
        path: Made with mode 0600 where there is none.
        version: Digest of the base, ``sha256:<hex>``.
    """

    def __init__(self, path: Path, version: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        drop_torn_line(path)
        self._version = version
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)

    def write(self, use: Use) -> None:
        """One request; nothing for one that used no token."""
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
        data = (json.dumps(line, ensure_ascii=True) + "\n").encode()
        with self._lock:
            os.write(self._file, data)

    def close(self) -> None:
        os.close(self._file)
