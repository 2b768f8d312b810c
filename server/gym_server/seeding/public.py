"""The objects that contributors may serve to each other: the served base, soups and their sums. Never an update."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import select

from gym_fed.core.errors import GymError
from gym_server.base.served import ServedBase
from gym_server.federation import Federation
from gym_server.seeding.tracker import SeedTracker
from gym_server.store.tables import readers, updates, versions

_ROWS_AT_ONCE = 500


def tracker_of(federation: Federation, base: ServedBase) -> SeedTracker:
    """Create the tracker of a hub."""
    config = federation.config
    objects = _PublicObjects(federation, base)
    return SeedTracker(
        config.seeding,
        federation.server,
        federation.key,
        federation.clock.now,
        config.listen.startswith(("127.", "localhost:", "[::1]:")),
        objects.among,
        objects.size_of,
        federation.traffic,
    )


class _PublicObjects:
    """The public objects of one hub."""

    def __init__(self, federation: Federation, base: ServedBase) -> None:
        self._database, self._store, self._base = federation.database, federation.store, base

    def among(self, names: Collection[str]) -> set[str]:
        """Return the public objects among some sha256 values."""
        found = {name for name in names if self._base.path_of(name) is not None}
        left = sorted(set(names) - found)
        with self._database.reading() as tx:
            for start in range(0, len(left), _ROWS_AT_ONCE):
                some = left[start : start + _ROWS_AT_ONCE]
                of_all = select(readers.c.sha256).where(
                    readers.c.contributor == "*",
                    readers.c.sha256.in_(some),
                    # A soup stays public if somebody sends it as an update.
                    readers.c.sha256.in_(select(versions.c.soup_sha256))
                    | readers.c.sha256.not_in(select(updates.c.delta_sha256)),
                )
                found.update(tx.scalars(of_all))
        return found

    def size_of(self, sha256: str) -> int | None:
        """Return the size of a public object in bytes; None for any other."""
        if (path := self._base.path_of(sha256)) is not None:
            return path.stat().st_size
        if sha256 not in self.among({sha256}):
            return None
        try:
            return self._store.size(sha256)
        except GymError:
            return None  # it was deleted just now
