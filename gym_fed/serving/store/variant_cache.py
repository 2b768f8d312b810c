"""Cache variants in memory: entries in use are kept, and missing ones are loaded in the background.

Variants with the same file share its weights, which are loaded once; each of their rows is verified.

Resident variants never exceed ``cache_bytes``, including those in use. If those leave no room, ``poll`` keeps
returning None and ``acquire`` keeps waiting until enough is released. A load first reserves room: the size of the file,
or the variant's previous size in memory. A variant that turns out to be larger than its file exceeds the limit only
while it loads; it is dropped, and loaded again when there is room for its real size. The size of parameters that it
replaces as a whole (experts) is known from its manifest before they are decoded.

A variant for which a request waits is not evicted before its first use, for at most 30 seconds, so that three variants
that alternate in a cache with room for two are all served. A prefetched variant is protected only from other
prefetches.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.store.records import VariantRecord
from gym_fed.serving.store.resident import Load, LoadQueue, RecentFailures, ResidentFiles, fresh

if TYPE_CHECKING:
    from gym_fed.serving.forward.variant_weights import LoadedVariant


@dataclass(frozen=True)
class StoreStats:
    """Statistics of the cache.

    Attributes:
        cache_bytes: The limit.
        resident: The number of variants in memory, including replaced ones that are still in use.
        resident_bytes: Their bytes of memory.
        pinned: The number of these variants that are in use.
        loading: The number of variants that are loading, or waiting for room.
        hits: Uses of a variant that was in memory when it was first requested.
        misses: Uses that had to wait for a load.
        loads: The number of variants loaded.
        evictions: The number of variants evicted.
        errors: The number of failed loads.
        load_seconds: The total time of all loads: hashing, verifying, memory-mapping, preparing.
    """

    cache_bytes: int
    resident: int
    resident_bytes: int
    pinned: int
    loading: int
    hits: int
    misses: int
    loads: int
    evictions: int
    errors: int
    load_seconds: float


_KNOWN_SIZES = 100_000
_log = logging.getLogger(__name__)
T = TypeVar("T")


class VariantCache:
    """A byte-limited cache with pinning, loading threads, and one load at a time per file.

    Args:
        load: Function that verifies a row and loads its file, or returns the file's weights if they are in memory;
            called from the loading threads.
        cache_bytes: The memory limit.
        threads: The number of loading threads.
        fingerprint: Function whose result changes when a file changes, so that a failed load is retried immediately.
        least_bytes: Function that returns a lower limit of a row's size in memory before it is loaded; called from the
            loading threads.
    """

    def __init__(
        self,
        load: Callable[[VariantRecord, LoadedVariant | None], LoadedVariant],
        cache_bytes: int,
        *,
        threads: int = 2,
        fingerprint: Callable[[VariantRecord], Hashable] = lambda record: None,
        least_bytes: Callable[[VariantRecord], int] = lambda record: 0,
    ) -> None:
        self._load, self._least_bytes = load, least_bytes
        self._changed = threading.Condition()
        self._resident = ResidentFiles(cache_bytes)
        self._loads = LoadQueue()
        self._failures = RecentFailures(fingerprint)
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._reserved = self._count = self._errors = 0
        self._seconds = 0.0
        self._closed = False
        self._workers = [
            threading.Thread(target=self._work, name=f"variant-load-{number}", daemon=True)
            for number in range(threads)
        ]
        self._started = False

    def poll(self, record: VariantRecord, user: str = "") -> LoadedVariant | None:
        """Return the variant, pinned, if it is in memory; otherwise start its load for a user and return None.

        Raises:
            GymError: If its last load failed, for some seconds or until its row or file changes.
        """
        with self._changed:
            variant = self._claim(record, user)
            if variant is None:
                self._failures.require_none(record)
                self._begin(record, user, urgent=True)
            return variant

    def lacks_room(self, name: str) -> bool:
        """Return True if the variant's load waits for memory that variants in use occupy."""
        with self._changed:
            load = self._loads.find(name)
            return load is not None and load.lacks_room

    def acquire(self, record: VariantRecord) -> LoadedVariant | None:
        """Wait for the variant, and return it pinned.

        Returns None if the variant was replaced meanwhile, or used by another caller and evicted again. The caller must
        then read its row again and repeat the call.

        Raises:
            GymError: If the load failed.
        """
        with self._changed:
            variant = self._claim(record, "")
            if variant is not None:
                return variant
            self._failures.require_none(record)
            load = self._begin(record, "", urgent=True)
            while not load.done and not self._closed:
                self._changed.wait()
            if self._closed:
                raise _closed()
            if load.error is not None:
                raise fresh(load.error)
            return self._claim(record, "")

    def prefetch(self, record: VariantRecord, user: str = "") -> None:
        """Start loading a variant if there is room, or if evicting variants that no request waits for makes room."""
        with self._changed:
            if not self._resident.has(record) and self._failures.find(record) is None:
                self._begin(record, user, urgent=False)

    def release(self, variant: LoadedVariant) -> None:
        """Unpin a variant after one use.

        Raises:
            GymError: ``USAGE`` if the variant is not in use.
        """
        with self._changed:
            if self._resident.unpin(variant):
                self._changed.notify_all()

    def retire(self, name: str) -> None:
        """Free the memory of a variant whose row was removed or replaced, as soon as its last use ends."""
        with self._changed:
            self._retire(name)

    def stats(self) -> StoreStats:
        with self._changed:
            return StoreStats(
                cache_bytes=self._resident.limit_bytes,
                resident=len(self._resident),
                resident_bytes=self._resident.used_bytes,
                pinned=self._resident.pinned,
                loading=len(self._loads),
                hits=self._resident.hits,
                misses=self._resident.misses,
                loads=self._count,
                evictions=self._resident.evictions,
                errors=self._errors,
                load_seconds=self._seconds,
            )

    def close(self) -> None:
        """Stop the loading threads; waiting calls raise."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._started:
            for worker in self._workers:
                worker.join()
        with self._changed:
            self._resident.clear()

    # ---- with the lock held ----

    def _claim(self, record: VariantRecord, user: str) -> LoadedVariant | None:
        if self._closed:
            raise _closed()
        variant = self._resident.claim(record, user)
        if variant is None:
            self._retire(record.name)
        return variant

    def _retire(self, name: str) -> None:
        if self._resident.retire(name):
            self._changed.notify_all()

    def _begin(self, record: VariantRecord, user: str, *, urgent: bool) -> Load:
        if self._closed:
            raise _closed()
        load = self._loads.begin(record, user, urgent=urgent)
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
            least = self._least(load.record)
            with self._changed:
                if not self._guarded(load, partial(self._reserve, load, least)):
                    continue
            self._run(load)
            del load  # keep no object alive while this thread waits for the next load

    def _least(self, record: VariantRecord) -> int:
        try:
            return self._least_bytes(record)
        except Exception:  # noqa: BLE001 - if the thread died, other loads would wait forever
            _log.exception("the size of variant %s is unknown until it is loaded", record.name)
            return 0

    def _run(self, load: Load) -> None:
        began = time.monotonic()
        variant, error = self._try(load)
        with self._changed:
            self._seconds += time.monotonic() - began
            self._guarded(load, partial(self._finish, load, variant, error))

    def _guarded(self, load: Load, step: Callable[[], T]) -> T | None:
        """Run a step of a load; an error ends this load for all its waiters, but does not end the thread."""
        try:
            return step()
        except Exception as error:  # noqa: BLE001 - if the thread died, other loads would wait forever
            self._give_back(load)
            self._errors += 1
            load.error = _unexpected(load.record, error)
            self._end(load)
            return None

    def _try(self, load: Load) -> tuple[LoadedVariant | None, GymError | None]:
        try:
            return self._load(load.record, load.shared), None
        except GymError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 - all waiters get the error, and this thread continues
            return None, _unexpected(load.record, error)

    def _next(self) -> Load | None:
        while not self._closed:
            if (load := self._loads.take()) is not None:
                return load
            self._changed.wait()
        return None

    def _reserve(self, load: Load, least: int) -> bool:
        """Wait for room; return False if a load is obsolete or too large, or there is no room for a prefetch."""
        load.shared = self._resident.pin(load.record.sha256)
        if load.shared is not None:
            return True
        if least > self._resident.limit_bytes:
            self._fail(load, _too_large(load.record, least, self._resident.limit_bytes))
            self._end(load)
            return False
        while not self._closed and not load.done:
            size = self._sizes.get(load.record.sha256, max(least, load.record.size_bytes))
            size = min(size, self._resident.limit_bytes)
            load.lacks_room = not self._resident.make_room(self._reserved + size, load.user, load.urgent)
            if not load.lacks_room:
                load.reserved = size
                self._reserved += size
                return True
            if not load.urgent:
                break
            self._changed.wait(timeout=1.0)  # variants protected for 30 s become evictable
        self._end(load)
        return False

    def _give_back(self, load: Load) -> None:
        """Release the memory reserved for a load, or its pinned weights."""
        self._reserved -= load.reserved
        load.reserved = 0
        shared, load.shared = load.shared, None
        if shared is not None:
            self._resident.unpin(shared)

    def _finish(self, load: Load, variant: LoadedVariant | None, error: GymError | None) -> None:
        is_new = load.shared is None
        if variant is not None and is_new:
            self._count += 1
            self._remember_size(load.record.sha256, variant.resident_bytes)
            if variant.resident_bytes > self._resident.limit_bytes:
                error = _too_large(load.record, variant.resident_bytes, self._resident.limit_bytes)
        if error is not None:
            self._fail(load, error)
        elif variant is not None and not load.done and not self._closed:
            self._reserved -= load.reserved
            load.reserved = 0
            size = variant.resident_bytes if is_new else 0
            if not self._resident.make_room(self._reserved + size, load.user, load.urgent):
                # it is larger than its file, so retry when there is room for its real size
                self._loads.again(load)
                return
            self._resident.put(load.record, variant, load.user, awaited=load.urgent)
        self._give_back(load)
        self._end(load)

    def _fail(self, load: Load, error: GymError) -> None:
        self._errors += 1
        load.error = error = fresh(error)
        if self._loads.is_current(load):
            self._failures.add(load.record, error)

    def _remember_size(self, sha256: str, size: int) -> None:
        self._sizes[sha256] = size
        self._sizes.move_to_end(sha256)
        if len(self._sizes) > _KNOWN_SIZES:
            self._sizes.popitem(last=False)

    def _end(self, load: Load) -> None:
        self._loads.end(load)
        self._changed.notify_all()


def _closed() -> GymError:
    return GymError(ErrorCode.UNAVAILABLE, "the variant store is closed")


def _unexpected(record: VariantRecord, error: Exception) -> GymError:
    """Return the error for an unexpected exception, and log its traceback; call it in the ``except`` block."""
    _log.exception("variant %s could not be loaded", record.name)
    message = f"variant {record.name!r} could not be loaded: {type(error).__name__}: {error}"
    return GymError(ErrorCode.INTERNAL, message)


def _too_large(record: VariantRecord, size: int, limit: int) -> GymError:
    return GymError(
        ErrorCode.TOO_LARGE,
        f"variant {record.name!r} takes {counted(size, 'byte')} of memory, but cache_size is {limit}",
        "raise cache_size",
    )
