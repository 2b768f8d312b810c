"""The queue of variant loads, urgent ones first, and recent failures. Not thread-safe."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from gym_fed.core.errors import GymError
from gym_fed.serving.forward.loaded import LoadedVariant
from gym_fed.serving.store.records import VariantRecord


class Load:
    """The load of a row, shared by all requests for it.

    Attributes:
        record: The row.
        urgent: Whether a request waits for it.
        running: Whether a thread is working on it.
        done: Whether it ended, or was superseded by another row.
        error: Why it failed.
        reserved: Bytes of memory reserved for it.
        shared: The weights of its file if they are in memory: then only the row has to be verified.
        lacks_room: Whether it waits for variants in use to be released.
    """

    def __init__(self, record: VariantRecord) -> None:
        self.record = record
        self.urgent = self.running = self.done = self.lacks_room = False
        self.error: GymError | None = None
        self.reserved = 0
        self.shared: LoadedVariant | None = None


class LoadQueue:
    """The loads by name, and the order in which threads take them. A file is loaded by one thread at a time."""

    def __init__(self) -> None:
        self._by_name: dict[str, Load] = {}
        self._urgent: deque[Load] = deque()
        self._later: deque[Load] = deque()
        self._files: set[str] = set()

    def __len__(self) -> int:
        """Return how many names are waited for."""
        return len(self._by_name)

    def find(self, name: str) -> Load | None:
        """Return the newest load of a name."""
        return self._by_name.get(name)

    def is_current(self, load: Load) -> bool:
        """Return whether the load has not ended and no newer row superseded it."""
        return self._by_name.get(load.record.name) is load

    def begin(self, record: VariantRecord, *, urgent: bool) -> Load:
        """Return the load of a row, which is created if necessary."""
        load = self._by_name.get(record.name)
        if load is None or load.record != record:
            if load is not None:
                load.done = True  # superseded: its waiters look the row up again
            load = self._by_name[record.name] = Load(record)
            if not urgent:
                self._later.append(load)
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
        """Put a load back at the front."""
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
    """Errors of loads by variant, reported for some seconds or until row or file change, then tried again.

    Args:
        fingerprint: Changes when a variant's file changes.
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
        """Return the error of the last load of this row and file, if it is recent."""
        failure = self._found.get(record.name)
        if failure is None:
            return None
        unchanged = failure.record == record and failure.file == self._fingerprint(record)
        if unchanged and failure.until > time.monotonic():
            return failure.error
        del self._found[record.name]
        return None

    def require_none(self, record: VariantRecord) -> None:
        """Raise the error that ``find`` returns, if any."""
        error = self.find(record)
        if error is not None:
            raise fresh(error)


def fresh(error: GymError) -> GymError:
    """Copy an error without its traceback, so that it does not keep what was being loaded alive."""
    return GymError(error.code, error.message, error.hint)
