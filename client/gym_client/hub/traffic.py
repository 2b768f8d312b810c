"""Bytes of objects that went down and up, for each hub: of the current task, and of all tasks of the home."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

from gym_client.identity.home import Home
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically


@dataclass(frozen=True)
class Bytes:
    """Bytes of soups, tensors and deltas; the messages around them are not counted."""

    down: int = 0
    up: int = 0

    def plus(self, other: Bytes) -> Bytes:
        return Bytes(self.down + other.down, self.up + other.up)

    def to_dict(self) -> dict[str, int]:
        """``bytes_down`` and ``bytes_up``, as receipts and ``--json`` have them."""
        return {"bytes_down": self.down, "bytes_up": self.up}


class Traffic:
    """Counts what one hub sends and gets. The caller holds the home's lock; counting is safe from any thread."""

    def __init__(self, home: Home, server: str) -> None:
        self._home, self._server = home, server
        self._lock = threading.Lock()
        self._unsaved = self._task = Bytes()

    @property
    def task(self) -> Bytes:
        """Of the task under way."""
        with self._lock:
            return self._task

    def begin(self) -> None:
        """A task begins."""
        with self._lock:
            self._task = Bytes()

    def count_down(self, num_bytes: int) -> None:
        """So many more came from the hub."""
        self._count(Bytes(down=num_bytes))

    def count_up(self, num_bytes: int) -> None:
        """So many more were handed to the network."""
        self._count(Bytes(up=num_bytes))

    def save(self) -> None:
        """Add what was counted since the last time to the home's total."""
        with self._lock:
            if self._unsaved == Bytes():
                return
            all_hubs = _read(self._home)
            total = _total(all_hubs, self._server).plus(self._unsaved)
            all_hubs[self._server] = {"down": total.down, "up": total.up}
            write_atomically(_path(self._home), json.dumps(all_hubs, indent=2, sort_keys=True).encode())
            self._unsaved = Bytes()

    def _count(self, more: Bytes) -> None:
        with self._lock:
            self._unsaved, self._task = self._unsaved.plus(more), self._task.plus(more)


def total_of(home: Home, server: str) -> Bytes:
    """All that this home has fetched from a hub and sent to it.

    Raises:
        GymError: ``STATE_CORRUPT`` naming the file.
    """
    return _total(_read(home), server)


def _path(home: Home) -> Any:
    return home.folder / "traffic.json"


def _read(home: Home) -> dict[str, Any]:
    path = _path(home)
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        for server in found:
            _total(found, server)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise GymError(
            ErrorCode.STATE_CORRUPT, f"{path} holds no totals: {error}", "delete it; only totals are lost"
        ) from error
    return dict(found)


def _total(found: dict[str, Any], server: str) -> Bytes:
    said = found.get(server, {"down": 0, "up": 0})
    return Bytes(int(said["down"]), int(said["up"]))
