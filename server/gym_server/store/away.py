"""The error of a database or object store that cannot be reached for a while."""

from __future__ import annotations

from gym_fed.core.errors import ErrorCode, GymError


class StoreAway(Exception):
    """Nothing of the call is known to be stored; calling again is safe.

    No ``GymError``, so that no code that turns a contributor's ``GymError`` into a verdict can refuse work because a
    disk was away. The strategy waits, and continues from the stored round.

    Args:
        refusal: For the coordinator: ``UNAVAILABLE``, ``BUSY``, ``DISK_FULL`` or ``NOT_WRITABLE``, with the place.
    """

    def __init__(self, refusal: GymError) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal

    @property
    def outside(self) -> GymError:
        """For contributors: they learn nothing of the place."""
        what = "the hub cannot do this now: its database or its object store is away, or full"
        return GymError(
            self.refusal.code, what, "try again later; if it stays so, report it to the coordinator"
        )


class WriteConflict(StoreAway):
    """The database undid a transaction because of another one; nothing of it is stored. ``BUSY`` if it stays so."""

    def __init__(self, shown: str) -> None:
        super().__init__(
            GymError(
                ErrorCode.BUSY,
                f"{shown} undid a transaction because of another one",
                "try again; if it continues, something besides gym-server writes to the database",
            )
        )
