"""Loads of variants that wait or run: those that requests wait for go first. Not for several threads at once."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from gym_fed.core.errors import GymError
from gym_fed.serving.forward.loaded import LoadedVariant
from gym_fed.serving.store.records import VariantRecord


class Load:
    """A row that is being loaded; all requests for it share the load.

    Attributes:
        record: The row.
        urgent: Whether a request waits for it.
        running: Whether a thread has it.
        done: Whether it ended, or another row took its place.
        error: Why it failed.
        reserved: Bytes that are kept free for it.
        shared: The weights of its file where these are in memory: only the row has to be verified.
        lacks_room: Whether it waits until variants that are in use are released.
    """

    def __init__(self, record: VariantRecord) -> None:
        self.record = record
        self.urgent = self.running = self.done = self.lacks_room = False
        self.error: GymError | None = None
        self.reserved = 0
        self.shared: LoadedVariant | None = None


class LoadQueue:
    """The loads by name, and the order in which threads take them. One file is loaded by one thread at a time."""

    def __init__(self) -> None:
        self._by_name: dict[str, Load] = {}
        self._urgent: deque[Load] = deque()
        self._later: deque[Load] = deque()
        self._files: set[str] = set()

    def __len__(self) -> int:
        """How many names are waited for."""
        return len(self._by_name)

    def find(self, name: str) -> Load | None:
        """The newest load of a name."""
        return self._by_name.get(name)

    def is_current(self, load: Load) -> bool:
        """Return whether no newer row took its place, and it has not ended."""
        return self._by_name.get(load.record.name) is load

    def begin(self, record: VariantRecord, *, urgent: bool) -> Load:
        """The load of a row: the one there is, or a new one."""
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
        """The next load whose file no other thread is loading; None: there is none now."""
        for waiting in (self._urgent, self._later):
            passed: list[Load] = []
            found = None
            while waiting and found is None:
                load = waiting.popleft()
                if load.running or load.done:
                    continue
                if load.record.sha256 in self._files:
                    passed.append(load)
                else:
                    found = load
            waiting.extendleft(reversed(passed))
            if found is not None:
                found.running = True
                self._files.add(found.record.sha256)
                return found
        return None

    def again(self, load: Load) -> None:
        """Put a load that a thread had at the front."""
        load.running = False
        self._files.discard(load.record.sha256)
        (self._urgent if load.urgent else self._later).appendleft(load)

    def end(self, load: Load) -> None:
        """A thread has ended it."""
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
    """Errors by variant, for some seconds or until its row or file changes. Not for several threads at once.

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
        """What the last load of this row and file failed with, if that was just now."""
        failure = self._found.get(record.name)
        if failure is None:
            return None
        unchanged = failure.record == record and failure.file == self._fingerprint(record)
        if unchanged and failure.until > time.monotonic():
            return failure.error
        del self._found[record.name]
        return None

    def require_none(self, record: VariantRecord) -> None:
        """Raise what ``find`` finds."""
        error = self.find(record)
        if error is not None:
            raise fresh(error)


def fresh(error: GymError) -> GymError:
    """A copy without a trace: each who waits raises its own, and none keeps what was being loaded."""
    return GymError(error.code, error.message, error.hint)
