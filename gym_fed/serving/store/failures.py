"""Recent failures of loads: reported to every request for the variant, then tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from gym_fed.core.errors import GymError
from gym_fed.serving.store.records import VariantRecord

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
