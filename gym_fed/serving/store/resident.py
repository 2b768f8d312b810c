"""The variants in memory by the digest of their files, limited in bytes; those in use stay.

The least frequently used files are evicted first, and among equals the least recently used. Recency alone needs
a third more loads where a few variants are requested often and many seldom (Zipf's law).

Variants with the same file share one entry, under every name that was verified for it. Not thread-safe:
``VariantCache`` holds its lock.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.forward.loaded import LoadedVariant
from gym_fed.serving.store.records import VariantRecord

_KEPT_SECONDS = 30.0


class ResidentFile:
    """The weights of a file in memory, and the rows that may use them.

    Attributes:
        variant: The weights.
        rows: Verified rows by name.
        awaited: Names that a request waited for and has not used yet.
        pins: Uses, and rows that are being verified.
        kept_until: The time from which even other prefetches may evict it.
    """

    def __init__(self, variant: LoadedVariant) -> None:
        self.variant = variant
        self.rows: dict[str, VariantRecord] = {}
        self.awaited: set[str] = set()
        self.pins = 0
        self.kept_until = 0.0


class ResidentFiles:
    """The files in memory, at most ``limit_bytes``.

    Attributes:
        limit_bytes: The limit of memory.
        used_bytes: The memory in use.
        evictions: The number of files evicted.
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
        """Return whether a row can be used at once."""
        file = self._files.get(record.sha256)
        return file is not None and file.rows.get(record.name) == record

    def claim(self, record: VariantRecord) -> LoadedVariant | None:
        """Pin the weights of a row; None if they are not in memory, or not verified for this row."""
        if not self.has(record):
            return None
        name = record.name
        file = self._files[record.sha256]
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
        """Pin the weights of a file for a row that has yet to be verified."""
        file = self._files.get(sha256)
        if file is None:
            return None
        file.pins += 1
        return file.variant

    def unpin(self, variant: LoadedVariant) -> bool:
        """End one use. Returns whether it was the last.

        Raises:
            GymError: ``USAGE`` if it is not in use.
        """
        file = self._files.get(variant.delta_sha256)
        if file is None or file.variant is not variant or not file.pins:
            raise GymError(ErrorCode.USAGE, f"variant {variant.name!r} is released more often than acquired")
        file.pins -= 1
        self._drop_unused(file)
        return not file.pins

    def put(self, record: VariantRecord, variant: LoadedVariant, *, awaited: bool) -> None:
        """Let a verified row use the weights of its file, which may be in memory already."""
        if self._digests.get(record.name) != record.sha256:
            self.retire(record.name)
        file = self._files.get(record.sha256)
        if file is None:
            file = self._files[record.sha256] = ResidentFile(variant)
            self.used_bytes += variant.resident_bytes
        self._files.move_to_end(record.sha256)
        file.rows[record.name] = record
        self._digests[record.name] = record.sha256
        file.awaited.discard(record.name)
        if awaited:
            file.awaited.add(record.name)
        file.kept_until = time.monotonic() + _KEPT_SECONDS

    def retire(self, name: str) -> bool:
        """Withdraw a name's weights. Returns whether that freed memory."""
        digest = self._digests.pop(name, None)
        if digest is None:
            return False
        file = self._files[digest]
        del file.rows[name]
        file.awaited.discard(name)
        return self._drop_unused(file)

    def make_room(self, size: int, urgent: bool) -> bool:
        """Evict until ``size`` fits, or nothing; a load for a waiting request may evict prefetched files."""
        missing = self.used_bytes + size - self.limit_bytes
        if missing <= 0:
            return True
        now, going = time.monotonic(), []
        for digest in sorted(self._files, key=self._uses.__getitem__):  # ties in the order of their last uses
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

    def clear(self) -> None:
        """Drop everything."""
        self._files.clear()
        self._digests.clear()
        self.used_bytes = 0

    def _drop_unused(self, file: ResidentFile) -> bool:
        """Drop a file that nobody uses and no row may use again."""
        if file.pins or file.rows:
            return False
        del self._files[file.variant.delta_sha256]
        self.used_bytes -= file.variant.resident_bytes
        return True


_USES_A_FILE = 10
"""Uses between two halvings, for each file in memory."""
_FEWEST_USES = 1000
HALVED_SECONDS = 300.0
"""Seconds between two halvings: 2000 uses, the most that are counted of a file, decay to none within an hour."""


class UseCounts:
    """Use counts by digest, also of files no longer in memory, which decay.

    Counts are halved every N uses, like TinyLFU's (Einziger, Friedman and Manes 2017, section 3.3), so that what was
    popular once is evicted in the end. They are also halved every few minutes, since on a server with few requests a
    short burst would keep its room for days.

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
        """Count one use; ``in_memory`` files are in memory now."""
        if periods := int((self._now() - self._halved_at) / HALVED_SECONDS):
            self._halved_at += periods * HALVED_SECONDS
            self._halve(periods)
        self._counts[digest] = self[digest] + 1
        self._since += 1
        if self._since >= max(_FEWEST_USES, _USES_A_FILE * in_memory):
            self._halve(1)

    def _halve(self, times: int) -> None:
        """Halve all counts, and forget those below one half."""
        self._since = 0
        part = 0.5 ** min(times, 64)
        self._counts = {digest: count * part for digest, count in self._counts.items() if count * part >= 0.5}
