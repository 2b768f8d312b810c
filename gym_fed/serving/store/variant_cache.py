"""The variants in memory: an LRU cache whose entries in use stay, and whose missing ones load in the background.

Resident variants never exceed ``cache_bytes``, including those in use. Where these leave no room, ``poll`` keeps
returning None and ``acquire`` keeps waiting until enough is released. A load first reserves room: the size of the file,
or what the variant took before. A variant that proves larger than its file exceeds the limit only while it loads; it
is dropped, and loaded again when there is room for its real size.

A variant for which a request waits is not evicted before its first use, or for half a minute. So three variants that
alternate in a cache for two are all served. A prefetched variant is kept so only from other prefetches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.forward.loaded import LoadedVariant
from gym_fed.serving.store.failures import RecentFailures, fresh
from gym_fed.serving.store.records import VariantRecord
from gym_fed.serving.store.stats import StoreStats

_KEPT_SECONDS = 30.0
_KNOWN_SIZES = 100_000
_log = logging.getLogger(__name__)
T = TypeVar("T")


class _CachedVariant:
    """A variant in memory."""

    def __init__(self, record: VariantRecord, variant: LoadedVariant, *, waited: bool) -> None:
        self.record = record
        self.variant = variant
        self.pins = 0
        self.waited = waited  # a request waited for it, and has not used it yet
        self.kept_until = time.monotonic() + _KEPT_SECONDS


class _Load:
    """A variant that is loading; all requests for it share the load."""

    def __init__(self, record: VariantRecord) -> None:
        self.record = record
        self.urgent = False
        self.running = False
        self.done = False
        self.error: GymError | None = None
        self.reserved = 0
        self.lacks_room = False


class VariantCache:
    """An LRU by bytes with pins, one load at a time for each variant, and threads that do the loading.

    Args:
        load: Verifies and loads; called from the loading threads.
        cache_bytes: Limit of what is in memory.
        threads: Loads at once.
        fingerprint: Changes when a file changes, so that one that failed is tried again at once.
    """

    def __init__(
        self,
        load: Callable[[VariantRecord], LoadedVariant],
        cache_bytes: int,
        *,
        threads: int = 2,
        fingerprint: Callable[[VariantRecord], Hashable] = lambda record: None,
    ) -> None:
        self._load = load
        self._cache_bytes = cache_bytes
        self._changed = threading.Condition()
        self._current: OrderedDict[str, _CachedVariant] = OrderedDict()  # least recently used first
        self._held: dict[LoadedVariant, _CachedVariant] = {}  # all in memory, replaced ones in use too
        self._loads: dict[str, _Load] = {}
        self._urgent: deque[_Load] = deque()
        self._later: deque[_Load] = deque()
        self._failures = RecentFailures(fingerprint)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._used = self._reserved = 0
        self._hits = self._misses = self._count = self._evictions = self._errors = 0
        self._seconds = 0.0
        self._closed = False
        self._workers = [
            threading.Thread(target=self._work, name=f"variant-load-{number}", daemon=True)
            for number in range(threads)
        ]
        self._started = False

    def poll(self, record: VariantRecord) -> LoadedVariant | None:
        """The variant, pinned, if it is in memory; otherwise None, and its load starts.

        Raises:
            GymError: Why its last load failed, for some seconds after or until row or file change.
        """
        with self._changed:
            found = self._claim(record)
            if found is None:
                self._failures.require_none(record)
                self._begin(record, urgent=True)
            return found

    def lacks_room(self, name: str) -> bool:
        """Whether its load waits until variants that are in use are released."""
        with self._changed:
            load = self._loads.get(name)
            return load is not None and load.lacks_room

    def acquire(self, record: VariantRecord) -> LoadedVariant | None:
        """The variant, pinned; waits for its load.

        None when it was replaced meanwhile, or used by another and evicted again: look its row up and call again.

        Raises:
            GymError: Why the load failed.
        """
        with self._changed:
            found = self._claim(record)
            if found is not None:
                return found
            self._failures.require_none(record)
            load = self._begin(record, urgent=True)
            while not load.done and not self._closed:
                self._changed.wait()
            if self._closed:
                raise _closed()
            if load.error is not None:
                raise fresh(load.error)
            return self._claim(record)

    def prefetch(self, record: VariantRecord) -> None:
        """Start its load if there is room for it, or if evicting variants nobody waits for makes room."""
        with self._changed:
            resident = self._current.get(record.name)
            is_there = resident is not None and resident.record == record
            if not is_there and self._failures.find(record) is None:
                self._begin(record, urgent=False)

    def release(self, variant: LoadedVariant) -> None:
        """End one use.

        Raises:
            GymError: ``USAGE`` when it is not in use.
        """
        with self._changed:
            found = self._held.get(variant)
            if found is None or not found.pins:
                raise GymError(
                    ErrorCode.USAGE, f"variant {variant.name!r} is released more often than acquired"
                )
            found.pins -= 1
            if not found.pins:
                if self._current.get(found.record.name) is not found:
                    self._drop(found)
                self._changed.notify_all()

    def retire(self, name: str) -> None:
        """Drop it from memory when its last use ends: its row was removed or replaced."""
        with self._changed:
            self._retire(name)

    def stats(self) -> StoreStats:
        with self._changed:
            return StoreStats(
                cache_bytes=self._cache_bytes,
                resident=len(self._held),
                resident_bytes=self._used,
                pinned=sum(1 for found in self._held.values() if found.pins),
                loading=len(self._loads),
                hits=self._hits,
                misses=self._misses,
                loads=self._count,
                evictions=self._evictions,
                errors=self._errors,
                load_seconds=self._seconds,
            )

    def close(self) -> None:
        """End the loading threads; waiting calls raise."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._started:
            for worker in self._workers:
                worker.join()
        with self._changed:
            self._current.clear()
            self._held.clear()
            self._used = 0

    # ---- with the lock held ----

    def _claim(self, record: VariantRecord) -> LoadedVariant | None:
        if self._closed:
            raise _closed()
        found = self._current.get(record.name)
        if found is None:
            return None
        if found.record != record:
            self._retire(record.name)
            return None
        self._current.move_to_end(record.name)
        if found.waited:
            self._misses += 1
        else:
            self._hits += 1
        found.pins += 1
        found.waited, found.kept_until = False, 0.0
        return found.variant

    def _retire(self, name: str) -> None:
        found = self._current.pop(name, None)
        if found is not None and not found.pins:
            self._drop(found)
            self._changed.notify_all()

    def _drop(self, found: _CachedVariant) -> None:
        del self._held[found.variant]
        self._used -= found.variant.resident_bytes

    def _begin(self, record: VariantRecord, *, urgent: bool) -> _Load:
        if self._closed:
            raise _closed()
        load = self._loads.get(record.name)
        if load is None or load.record != record:
            if load is not None:
                load.done = True  # superseded: its waiters look the row up again
                self._changed.notify_all()
            load = self._loads[record.name] = _Load(record)
            if not urgent:
                self._later.append(load)
                self._changed.notify_all()
        if urgent and not load.urgent:
            load.urgent = True
            if not load.running:
                self._urgent.append(load)
                self._changed.notify_all()
        if not self._started:
            self._started = True
            for worker in self._workers:
                worker.start()
        return load

    # ---- the loading threads ----

    def _work(self) -> None:
        while True:
            with self._changed:
                load = self._next()
                if load is None:
                    return
                if not self._guarded(load, partial(self._reserve, load)):
                    continue
            self._run(load)
            del load  # while this thread waits for the next one it holds nothing

    def _run(self, load: _Load) -> None:
        began = time.monotonic()
        variant, error = self._try(load.record)
        with self._changed:
            self._seconds += time.monotonic() - began
            self._guarded(load, partial(self._finish, load, variant, error))

    def _guarded(self, load: _Load, step: Callable[[], T]) -> T | None:
        """Run a step of a load; an error ends this load, for all its waiters, and not the thread."""
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - a thread less would leave others waiting for good
            self._reserved -= load.reserved
            load.reserved = 0
            self._errors += 1
            load.error = _unexpected(load.record, error)
            self._end(load)
            return None

    def _try(self, record: VariantRecord) -> tuple[LoadedVariant | None, GymError | None]:
        try:
            return self._load(record), None
        except GymError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 - all waiters get it, and this thread continues
            return None, _unexpected(record, error)

    def _next(self) -> _Load | None:
        while not self._closed:
            for waiting in (self._urgent, self._later):
                while waiting:
                    load = waiting.popleft()
                    if not load.running and not load.done:
                        load.running = True
                        return load
            self._changed.wait()
        return None

    def _reserve(self, load: _Load) -> bool:
        """Wait for room; False when nobody wants the load any more, or when a prefetch finds none."""
        while not self._closed and not load.done:
            size = self._sizes.get(load.record.sha256, load.record.size_bytes)
            size = min(size, self._cache_bytes)
            load.lacks_room = not self._make_room(size, load.urgent)
            if not load.lacks_room:
                load.reserved = size
                self._reserved += size
                return True
            if not load.urgent:
                self._end(load)
                return False
            self._changed.wait(timeout=1.0)  # a variant kept for a waiter may be evicted after its time
        return False

    def _make_room(self, size: int, urgent: bool) -> bool:
        """Evict until it fits, or nothing; a load for a waiting request may evict prefetched variants."""
        missing = self._used + self._reserved + size - self._cache_bytes
        if missing <= 0:
            return True
        now, going = time.monotonic(), []
        for found in self._current.values():
            if not found.pins and (found.kept_until <= now or (urgent and not found.waited)):
                going.append(found)
                missing -= found.variant.resident_bytes
                if missing <= 0:
                    break
        if missing > 0:
            return False
        for found in going:
            del self._current[found.record.name]
            self._drop(found)
            self._evictions += 1
        return True

    def _finish(self, load: _Load, variant: LoadedVariant | None, error: GymError | None) -> None:
        self._reserved -= load.reserved
        load.reserved = 0
        if variant is not None:
            self._count += 1
            self._remember_size(load.record.sha256, variant.resident_bytes)
            if variant.resident_bytes > self._cache_bytes:
                error = _too_large(load.record, variant.resident_bytes, self._cache_bytes)
        if error is not None:
            self._fail(load, error)
        elif variant is not None and not load.done and not self._closed:
            if not self._make_room(variant.resident_bytes, load.urgent):
                load.running = (
                    False  # larger than its file, and others are in use: again, with room for all of it
                )
                (self._urgent if load.urgent else self._later).appendleft(load)
                return
            self._retire(load.record.name)
            resident = _CachedVariant(load.record, variant, waited=load.urgent)
            self._current[load.record.name] = self._held[variant] = resident
            self._used += variant.resident_bytes
        self._end(load)

    def _fail(self, load: _Load, error: GymError) -> None:
        self._errors += 1
        load.error = error = fresh(error)
        if self._loads.get(load.record.name) is load:
            self._failures.add(load.record, error)

    def _remember_size(self, sha256: str, size: int) -> None:
        self._sizes[sha256] = size
        self._sizes.move_to_end(sha256)
        if len(self._sizes) > _KNOWN_SIZES:
            self._sizes.popitem(last=False)

    def _end(self, load: _Load) -> None:
        load.done = True
        if self._loads.get(load.record.name) is load:
            del self._loads[load.record.name]
        self._changed.notify_all()


def _closed() -> GymError:
    return GymError(ErrorCode.UNAVAILABLE, "the variant store is closed")


def _unexpected(record: VariantRecord, error: Exception) -> GymError:
    """The error of a defect, whose trace goes to the log. Called where it is caught."""
    _log.exception("variant %s could not be loaded", record.name)
    what = f"variant {record.name!r} could not be loaded: {type(error).__name__}: {error}"
    return GymError(ErrorCode.INTERNAL, what)


def _too_large(record: VariantRecord, size: int, limit: int) -> GymError:
    return GymError(
        ErrorCode.TOO_LARGE,
        f"variant {record.name!r} takes {size} bytes of memory, and cache_size is {limit}",
        "give variants more memory with cache_size",
    )
