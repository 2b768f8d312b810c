"""Arrow files that are written once and mapped by every later start, each named after what it was made from.

::

    $GYM_HOME/cache/arrow/<digest>.arrow    rows, or encoded rows
    $GYM_HOME/cache/arrow/<digest>.json     written last: its size, and facts about it

The folder may be deleted while no run is starting; its files are then written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator
from typing import IO, Any

from gym_fed.core.files import default_home, fsync_folder, full_disk_named, make_folder, write_atomically
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
    """

    def __init__(self, digest: str) -> None:
        self.path = default_home() / "cache" / "arrow" / f"{digest}.arrow"
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

    def fill(
        self, write: Callable[[IO[bytes]], Iterator[int]], facts: Callable[[], dict[str, Any]]
    ) -> Iterator[int]:
        """Write the file, yielding what ``write`` yields; it is valid after the last item.

        Args:
            write: Function that writes the contents to a binary file.
            facts: Called after the last item; its JSON is stored next to the file.
        """
        make_folder(self.path.parent)
        part = self.path.with_name(f".{self.path.stem}.{secrets.token_hex(8)}.part")
        try:
            with full_disk_named(self.path.parent):
                with part.open("wb") as sink:
                    yield from write(sink)
                    sink.flush()
                    os.fsync(sink.fileno())
                index = {"bytes": part.stat().st_size, "facts": facts()}
                os.replace(part, self.path)
                fsync_folder(self.path.parent)
                write_atomically(self._index, json.dumps(index, indent=1, sort_keys=True).encode())
        finally:
            part.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        index: dict[str, Any] = json.loads(self._index.read_text(encoding="utf-8"))
        return index
