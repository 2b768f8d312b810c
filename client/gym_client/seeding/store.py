"""The objects that this machine may serve to other contributors, and counts of the served bytes.

An object is added after it was downloaded as a public object and its SHA-256 was verified. Nothing else is served:
objects cannot be listed, and no path is ever received from outside.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import shutil
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from gym_client.identity.home import Home
from gym_client.seeding.policy import Kind, SeedingPolicy
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.core.json_files import read_object

log = logging.getLogger("gym_client")

_SAVE_BYTES = 16 << 20


@dataclass(frozen=True)
class Seed:
    """An object that this machine may serve."""

    path: Path
    size_bytes: int
    kind: Kind


class SeedStore:
    """A folder of links to the objects, emptied at startup. Thread-safe.

    Args:
        folder: The folder, on the same disk as the objects.
        policy: Kinds of objects to serve, and the maximum bytes of soups.
    """

    def __init__(self, folder: Path, policy: SeedingPolicy) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        make_folder(folder, 0o700)
        self._folder, self._policy = folder, policy
        self._seeds: dict[str, Seed] = {}  # oldest first
        self._lock = threading.Lock()

    def add(self, path: Path, sha256: str, kind: Kind, min_bytes: int = 0) -> bool:
        """Add a verified object. Return True if it is new and may be served.

        A file that cannot be read, linked or copied is skipped, since serving must never make a download fail.
        """
        target = self._folder / sha256
        with self._lock:
            if sha256 in self._seeds:
                return False
            try:
                size = path.stat().st_size
                if size < min_bytes or not self.serves(kind, size):
                    return False
                _link(path, target, may_copy=kind != "base")
            except OSError as error:
                target.unlink(missing_ok=True)
                log.info("object %s is not served: %s", sha256[:12], error)
                return False
            self._seeds[sha256] = Seed(target, size, kind)
            self._drop_oldest()
            return True

    def serves(self, kind: Kind, size_bytes: int) -> bool:
        """Return True if the policy allows serving objects of this kind and size."""
        fits = kind != "soups" or size_bytes <= self._policy.max_disk_bytes
        return kind in self._policy.serves and fits

    def follow(self, policy: SeedingPolicy) -> None:
        """Apply a changed policy, and remove the objects that it no longer allows."""
        with self._lock:
            self._policy = policy
            for name, seed in list(self._seeds.items()):
                if policy.listen is None or seed.kind not in policy.serves:
                    self._drop(name)
            self._drop_oldest()

    def find(self, sha256: str) -> Seed | None:
        """Return an object that may be served; None if there is no such object, or if its file was changed."""
        with self._lock:
            seed = self._seeds.get(sha256)
            if seed is None or not seed.path.is_file() or seed.path.stat().st_size != seed.size_bytes:
                return None
            return seed

    def names(self) -> list[str]:
        """Return the SHA-256 of all objects."""
        with self._lock:
            return list(self._seeds)

    def close(self) -> None:
        """Delete the links."""
        with self._lock:
            self._seeds.clear()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _drop_oldest(self) -> None:
        soups = {name: seed for name, seed in self._seeds.items() if seed.kind == "soups"}
        total = sum(seed.size_bytes for seed in soups.values())
        for name, seed in soups.items():
            if total <= self._policy.max_disk_bytes:
                break
            self._drop(name)
            total -= seed.size_bytes

    def _drop(self, name: str) -> None:
        self._seeds.pop(name).path.unlink(missing_ok=True)


def remove_leftovers(home: Home) -> None:
    """Delete the links and the unverified downloads of a killed process, since both occupy disk space."""
    shutil.rmtree(seeds_folder(home), ignore_errors=True)
    for path in home.objects.glob("*.seed"):
        path.unlink(missing_ok=True)


def seeds_folder(home: Home) -> Path:
    """Return the folder of a home's ``SeedStore``."""
    return home.folder / "seeds"


def _link(path: Path, target: Path, may_copy: bool) -> None:
    """Link the object, so that it stays available if its file is deleted or moved; copy it if it is on another disk."""
    try:
        os.link(path, target)
    except OSError:
        if not may_copy:
            raise
        shutil.copyfile(path, target)


@dataclass
class SeedingBytes:
    """Bytes exchanged with other contributors: the totals, and those served on one day (UTC)."""

    received: int = 0
    served: int = 0
    day: str = ""
    served_on_day: int = 0


class SeedingTotals:
    """Counts the bytes in ``seeding.json`` in the home. The caller must hold the home's lock. Thread-safe."""

    def __init__(self, home: Home, max_bytes_per_day: int = 0) -> None:
        self.max_bytes_per_day = max_bytes_per_day
        self._path = home.folder / "seeding.json"
        self._bytes, self._unsaved = self._read(), 0
        self._lock = threading.Lock()

    @property
    def now(self) -> SeedingBytes:
        """The bytes so far; those of today are 0 if nothing was served today."""
        with self._lock:
            self._begin_day()
            return SeedingBytes(**asdict(self._bytes))

    def receive(self, num_bytes: int) -> None:
        """Count bytes that were received from another contributor."""
        with self._lock:
            self._bytes.received += num_bytes
            self._count(num_bytes)

    def may_serve(self, num_bytes: int) -> bool:
        """Return True if today's limit allows this many bytes."""
        with self._lock:
            self._begin_day()
            return self._bytes.served_on_day + num_bytes <= self.max_bytes_per_day

    def reserve(self, num_bytes: int) -> str:
        """Reserve bytes of today's limit for a download. Return the day; empty if the limit does not allow them."""
        with self._lock:
            self._begin_day()
            if self._bytes.served_on_day + num_bytes > self.max_bytes_per_day:
                return ""
            self._bytes.served_on_day += num_bytes
            return self._bytes.day

    def serve(self, num_bytes: int) -> None:
        """Count reserved bytes as served."""
        with self._lock:
            self._bytes.served += num_bytes
            self._count(num_bytes)

    def release(self, num_bytes: int, day: str) -> None:
        """Release bytes that were reserved on ``day`` but not served; those of earlier days no longer count."""
        with self._lock:
            self._begin_day()
            if self._bytes.day == day:
                self._bytes.served_on_day -= num_bytes

    def save(self) -> None:
        """Write the file."""
        with self._lock:
            self._write()

    def _count(self, num_bytes: int) -> None:
        self._unsaved += num_bytes
        if self._unsaved >= _SAVE_BYTES:
            self._write()

    def _write(self) -> None:
        write_atomically(self._path, json.dumps(asdict(self._bytes), sort_keys=True).encode())
        self._unsaved = 0

    def _begin_day(self) -> None:
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        if self._bytes.day != today:
            self._bytes.day, self._bytes.served_on_day = today, 0

    def _read(self) -> SeedingBytes:
        if not self._path.exists():
            return SeedingBytes()
        remedy = "delete the file; only totals are lost"
        try:
            found = SeedingBytes(**read_object(self._path, ErrorCode.STATE_CORRUPT, remedy))
        except TypeError:
            found = None
        counts = () if found is None else (found.received, found.served, found.served_on_day)
        if found is None or not all(type(count) is int and count >= 0 for count in counts):
            raise GymError(ErrorCode.STATE_CORRUPT, f"{self._path} does not contain totals", remedy)
        return found
