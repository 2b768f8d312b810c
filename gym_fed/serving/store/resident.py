"""Variants in memory, keyed by file digest and limited in bytes, and the queue that loads them.

The files of users with more than an equal share of the memory are evicted first, so that one user with many variants
displaces only their own. Among them, the least frequently used files are evicted first, and on a tie the least recently
used; files in use stay. LRU alone would need a third more loads if a few variants are requested often and many rarely
(Zipf's law).

Variants with the same file share one entry, under every name that was verified for it. Not thread-safe:
``VariantCache`` holds the lock.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.store.records import VariantRecord

if TYPE_CHECKING:
    from gym_fed.serving.forward.variant_weights import LoadedVariant

_KEPT_SECONDS = 30.0


class ResidentFile:
    """The weights of a file in memory, and the rows that may use them.

    Attributes:
        variant: The weights.
        rows: Verified rows by name.
        awaited: Names that a request has waited for but not used yet.
        pins: The number of uses, and of rows being verified.
        kept_until: The time until which prefetches may not evict it; other loads may not either while a name is
            awaited.
        user: The user who requested it last, whose share it counts towards.
    """

    def __init__(self, variant: LoadedVariant, user: str) -> None:
        self.variant, self.user = variant, user
        self.rows: dict[str, VariantRecord] = {}
        self.awaited: set[str] = set()
        self.pins = 0
        self.kept_until = 0.0


class ResidentFiles:
    """The files in memory, at most ``limit_bytes``.

    Attributes:
        limit_bytes: The memory limit in bytes.
        used_bytes: The memory in use.
        evictions: The number of evicted files.
        hits: Uses of a row that was in memory when it was first requested.
        misses: Uses that had to wait for a load.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = self.evictions = self.hits = self.misses = 0
        self._files: OrderedDict[str, ResidentFile] = OrderedDict()  # by digest, least recently used first
        self._digests: dict[str, str] = {}  # by name
        self._uses = UseCounts()

    def __len__(self) -> int:
        return len(self._files)

    @property
    def names(self) -> list[str]:
        """The names of all rows, those of the least recently used file first."""
        return [name for file in self._files.values() for name in file.rows]

    @property
    def pinned(self) -> int:
        """The number of files in use."""
        return sum(1 for file in self._files.values() if file.pins)

    def has(self, record: VariantRecord) -> bool:
        """Return True if a row can be used without loading."""
        file = self._files.get(record.sha256)
        return file is not None and file.rows.get(record.name) == record

    def claim(self, record: VariantRecord, user: str) -> LoadedVariant | None:
        """Pin the weights of a row for a user; None if they are not in memory, or not verified for this row."""
        if not self.has(record):
            return None
        name = record.name
        file = self._files[record.sha256]
        file.user = user
        self._files.move_to_end(record.sha256)
        self._uses.note(record.sha256, len(self._files))
        if name in file.awaited:
            self.misses += 1
            file.awaited.discard(name)
        else:
            self.hits += 1
        if not file.awaited:
            file.kept_until = 0.0
        file.pins += 1
        return file.variant

    def pin(self, sha256: str) -> LoadedVariant | None:
        """Pin the weights of a file, for a row that is not verified yet; None if they are not in memory."""
        file = self._files.get(sha256)
        if file is None:
            return None
        file.pins += 1
        return file.variant

    def unpin(self, variant: LoadedVariant) -> bool:
        """Unpin one use, and return True if it was the last.

        Raises:
            GymError: ``USAGE`` if it is not in use.
        """
        file = self._files.get(variant.delta_sha256)
        if file is None or file.variant is not variant or not file.pins:
            raise GymError(ErrorCode.USAGE, f"variant {variant.name!r} was released more often than acquired")
        file.pins -= 1
        self._drop_unused(file)
        return not file.pins

    def put(self, record: VariantRecord, variant: LoadedVariant, user: str, *, awaited: bool) -> None:
        """Add a verified row to its file, whose weights may already be in memory."""
        if self._digests.get(record.name) != record.sha256:
            self.retire(record.name)
        file = self._files.get(record.sha256)
        if file is None:
            file = self._files[record.sha256] = ResidentFile(variant, user)
            self.used_bytes += variant.resident_bytes
        self._files.move_to_end(record.sha256)
        file.rows[record.name] = record
        self._digests[record.name] = record.sha256
        file.awaited.discard(record.name)
        if awaited:
            file.awaited.add(record.name)
        file.kept_until = time.monotonic() + _KEPT_SECONDS

    def retire(self, name: str) -> bool:
        """Remove a name from its file, and return True if that freed memory."""
        digest = self._digests.pop(name, None)
        if digest is None:
            return False
        file = self._files[digest]
        del file.rows[name]
        file.awaited.discard(name)
        return self._drop_unused(file)

    def make_room(self, size: int, user: str, urgent: bool) -> bool:
        """Evict files in the order described above until ``size`` more bytes of a user fit; evict none if they cannot.

        Urgent loads may also evict recent prefetches.
        """
        missing = self.used_bytes + size - self.limit_bytes
        if missing <= 0:
            return True
        now, going = time.monotonic(), []
        over = self._over_share(user, size)
        # Ties are in the order of their last uses
        for digest in sorted(
            self._files, key=lambda one: (self._files[one].user not in over, self._uses[one])
        ):
            file = self._files[digest]
            if not file.pins and (file.kept_until <= now or (urgent and not file.awaited)):
                going.append(file)
                missing -= file.variant.resident_bytes
                if missing <= 0:
                    break
        if missing > 0:
            return False
        for file in going:
            for name in list(file.rows):
                self.retire(name)
            self.evictions += 1
        return True

    def _over_share(self, user: str, size: int) -> set[str]:
        """Return the users with more than an equal share of the memory, counting ``size`` more bytes for ``user``."""
        held = Counter({user: size})
        for file in self._files.values():
            held[file.user] += file.variant.resident_bytes
        return {name for name, number in held.items() if number * len(held) > self.limit_bytes}

    def clear(self) -> None:
        """Remove all files."""
        self._files.clear()
        self._digests.clear()
        self.used_bytes = 0

    def _drop_unused(self, file: ResidentFile) -> bool:
        """Remove a file if it is not in use and no row refers to it."""
        if file.pins or file.rows:
            return False
        del self._files[file.variant.delta_sha256]
        self.used_bytes -= file.variant.resident_bytes
        return True


_USES_A_FILE = 10
"""Number of uses between two halvings, per file in memory."""
_MIN_USES = 1000
HALVED_SECONDS = 300.0
"""Seconds between two halvings: 2000 uses, the maximum count of a file, decay to 0 within an hour."""


class Load:
    """The load of a row, shared by all requests for it.

    Attributes:
        record: The row.
        user: The user who requested it last.
        urgent: True if a request waits for it.
        running: True if a thread is working on it.
        done: True if it has ended or was superseded by another row.
        error: Why it failed.
        reserved: Bytes of memory reserved for it.
        shared: The weights of its file if they are in memory, so that only the row must be verified.
        lacks_room: True if it waits for variants in use to be released.
    """

    def __init__(self, record: VariantRecord, user: str) -> None:
        self.record, self.user = record, user
        self.urgent = self.running = self.done = self.lacks_room = False
        self.error: GymError | None = None
        self.reserved = 0
        self.shared: LoadedVariant | None = None


class LoadQueue:
    """The loads by name, and the order in which threads take them. Only one thread at a time loads a file."""

    def __init__(self) -> None:
        self._by_name: dict[str, Load] = {}
        self._urgent: deque[Load] = deque()
        self._later: deque[Load] = deque()
        self._files: set[str] = set()

    def __len__(self) -> int:
        """Return the number of names with a load."""
        return len(self._by_name)

    def find(self, name: str) -> Load | None:
        """Return the newest load of a name, or None."""
        return self._by_name.get(name)

    def is_current(self, load: Load) -> bool:
        """Return True if the load has not ended, and no newer row has superseded it."""
        return self._by_name.get(load.record.name) is load

    def begin(self, record: VariantRecord, user: str, *, urgent: bool) -> Load:
        """Return the load of a row, creating it if necessary."""
        load = self._by_name.get(record.name)
        if load is None or load.record != record:
            if load is not None:
                load.done = True  # it is superseded, so its waiters look up the row again
            load = self._by_name[record.name] = Load(record, user)
            if not urgent:
                self._later.append(load)
        load.user = user
        if urgent and not load.urgent:
            load.urgent = True
            if not load.running:
                self._urgent.append(load)
        return load

    def take(self) -> Load | None:
        """Return the next load whose file no other thread is loading; None if there is none."""
        for waiting in (self._urgent, self._later):
            passed: list[Load] = []
            chosen = None
            while waiting and chosen is None:
                load = waiting.popleft()
                if load.running or load.done:
                    continue
                if load.record.sha256 in self._files:
                    passed.append(load)
                else:
                    chosen = load
            waiting.extendleft(reversed(passed))
            if chosen is not None:
                chosen.running = True
                self._files.add(chosen.record.sha256)
                return chosen
        return None

    def again(self, load: Load) -> None:
        """Put a load back at the front of its queue."""
        load.running = False
        self._files.discard(load.record.sha256)
        (self._urgent if load.urgent else self._later).appendleft(load)

    def end(self, load: Load) -> None:
        """Remove a load that has ended."""
        load.done = True
        if load.running:
            self._files.discard(load.record.sha256)
        if self.is_current(load):
            del self._by_name[load.record.name]


_REPORTED_SECONDS = 5.0


@dataclass(frozen=True)
class _Failure:
    record: VariantRecord
    error: GymError
    until: float
    file: Hashable


class RecentFailures:
    """Errors of loads by variant, which are reported for some seconds, or until the row or file changes.

    Args:
        fingerprint: Function whose result changes when a variant's file changes.
    """

    def __init__(self, fingerprint: Callable[[VariantRecord], Hashable]) -> None:
        self._fingerprint = fingerprint
        self._found: dict[str, _Failure] = {}

    def add(self, record: VariantRecord, error: GymError) -> None:
        """Remember why a load failed."""
        now = time.monotonic()
        for name in [name for name, failure in self._found.items() if failure.until <= now]:
            del self._found[name]
        self._found[record.name] = _Failure(record, error, now + _REPORTED_SECONDS, self._fingerprint(record))

    def find(self, record: VariantRecord) -> GymError | None:
        """Return the recent error of the last load of this row and file, or None."""
        failure = self._found.get(record.name)
        if failure is None:
            return None
        unchanged = failure.record == record and failure.file == self._fingerprint(record)
        if unchanged and failure.until > time.monotonic():
            return failure.error
        del self._found[record.name]
        return None

    def require_none(self, record: VariantRecord) -> None:
        """Raise the error that ``find`` returns, if there is one."""
        error = self.find(record)
        if error is not None:
            raise fresh(error)


def fresh(error: GymError) -> GymError:
    """Copy an error without its traceback, which would keep the loaded objects alive."""
    return GymError(error.code, error.message, error.hint)


class UseCounts:
    """Decaying use counts by digest, including files that are no longer in memory.

    Counts are halved every N uses, like TinyLFU's (Einziger, Friedman and Manes 2017, section 3.3), so that formerly
    popular variants are eventually evicted. They are also halved every few minutes, since otherwise a short burst would
    occupy memory for days on a server with few requests.

    Args:
        now: A monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._counts: dict[str, float] = {}
        self._since = 0
        self._halved_at = now()

    def __getitem__(self, digest: str) -> float:
        return self._counts.get(digest, 0.0)

    def __len__(self) -> int:
        return len(self._counts)

    def note(self, digest: str, in_memory: int) -> None:
        """Count one use, given the number of files in memory."""
        if periods := int((self._now() - self._halved_at) / HALVED_SECONDS):
            self._halved_at += periods * HALVED_SECONDS
            self._halve(periods)
        self._counts[digest] = self[digest] + 1
        self._since += 1
        if self._since >= max(_MIN_USES, _USES_A_FILE * in_memory):
            self._halve(1)

    def _halve(self, times: int) -> None:
        """Halve all counts, and drop those below one half."""
        self._since = 0
        part = 0.5 ** min(times, 64)
        self._counts = {digest: count * part for digest, count in self._counts.items() if count * part >= 0.5}
