"""Arrow files that are written once and mapped by every later start, each named after what it was made from.

::

    $GYM_HOME/cache/arrow/<digest>.arrow    rows, or encoded rows
    $GYM_HOME/cache/arrow/<digest>.json     written last: its size and digest, and facts about it

The folder may be deleted while no run is starting; its files are then written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import IO, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import (
    default_home,
    file_sha256,
    fsync_folder,
    full_disk_named,
    make_folder,
    write_atomically,
)
from gym_fed.version import __version__

FORMAT_VERSION = 1
"""Incremented with every change of the format, of how rows are read, or of how they are encoded."""


def recipe_digest(recipe: Any) -> str:
    """Return the name of the file that is made from ``recipe``, a JSON value with everything that it depends on."""
    text = json.dumps([FORMAT_VERSION, __version__, recipe], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class ArrowCache:
    """One file of the cache.

    Args:
        digest: The result of ``recipe_digest``.
        folder: Folder of the file instead of the common one.
    """

    def __init__(self, digest: str, folder: Path | None = None) -> None:
        folder = default_home() / "cache" / "arrow" if folder is None else folder
        self.path = folder / f"{digest}.arrow"
        self._index = self.path.with_suffix(".json")

    def is_filled(self) -> bool:
        """Return True if the file was written completely and has the size it was written with."""
        try:
            return bool(self._read()["bytes"] == self.path.stat().st_size)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def facts(self) -> dict[str, Any]:
        """Return the facts that ``fill`` stored."""
        return dict(self._read()["facts"])

    def require_intact(self) -> None:
        """Read the whole file.

        Raises:
            GymError: ``STATE_CORRUPT`` if its bytes have changed.
        """
        if file_sha256(self.path) != self._read()["sha256"]:
            remedy = f"delete {self.path}; it is written again"
            raise GymError(ErrorCode.STATE_CORRUPT, f"{self.path}: its bytes have changed", remedy)

    def fill(
        self,
        write: Callable[[IO[bytes]], Iterator[int]],
        facts: Callable[[], dict[str, Any]],
        digest_now: Callable[[], str] | None = None,
    ) -> Generator[int, None, None]:
        """Write the file, yielding what ``write`` yields; it is valid after the last item.

        Args:
            write: Function that writes the contents to a binary file.
            facts: Called after the last item; its JSON is stored next to the file.
            digest_now: Called after the last item. If the digest differs, a source has changed while it was read, and
                nothing is kept.
        """
        make_folder(self.path.parent)
        part = self.path.with_name(f".{self.path.stem}.{secrets.token_hex(8)}.part")
        try:
            with full_disk_named(self.path.parent):
                with part.open("wb") as sink:
                    yield from write(sink)
                    sink.flush()
                    os.fsync(sink.fileno())
                if digest_now is not None and digest_now() != self.path.stem:
                    return
                size, sha256 = part.stat().st_size, file_sha256(part)
                index = {"bytes": size, "sha256": sha256, "facts": facts()}
                os.replace(part, self.path)
                fsync_folder(self.path.parent)
                write_atomically(self._index, json.dumps(index, indent=1, sort_keys=True).encode())
        finally:
            part.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        index: dict[str, Any] = json.loads(self._index.read_text(encoding="utf-8"))
        return index
