"""The error for a database or object store that is temporarily unreachable."""

from __future__ import annotations

from gym_fed.core.errors import ErrorCode, GymError


class StoreUnavailable(Exception):
    """Raised if a store is unreachable. Nothing is known to be stored, and the call can be retried safely.

    It is not a ``GymError``, so that code that converts a ``GymError`` into a verdict cannot refuse work because of an
    unreachable store. The strategy waits, and resumes from the stored round.

    Args:
        refusal: Error for the coordinator: ``UNAVAILABLE``, ``BUSY``, ``DISK_FULL`` or ``NOT_WRITABLE``, with the
            location.
    """

    def __init__(self, refusal: GymError) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal

    @property
    def outside(self) -> GymError:
        """Return the error for contributors, which does not reveal the location."""
        what = "the hub cannot do this now: its database or object store is unreachable or full"
        return GymError(
            self.refusal.code, what, "try again later; if it persists, report it to the coordinator"
        )


class WriteConflict(StoreUnavailable):
    """Raised if the database rolled a transaction back because of a concurrent one; ``BUSY`` after the last retry."""

    def __init__(self, shown: str) -> None:
        super().__init__(
            GymError(
                ErrorCode.BUSY,
                f"{shown} rolled back a transaction because of a concurrent one",
                "try again; if it persists, something other than gym-server writes to the database",
            )
        )
