"""The objects that contributors may serve to each other: the served base, soups and their sums, but no updates."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection

from sqlalchemy import exists, select

from gym_fed.core.errors import GymError
from gym_server.base.served import ServedBase
from gym_server.federation import Federation
from gym_server.seeding.tracker import PublicObject, SeedTracker
from gym_server.store.tables import readers, versions

_ROWS_AT_ONCE = 500
_KNOWN_SECONDS = 10.0
"""Lifetime of a cached description, in seconds; contributors who wait for an object request it twice a second."""
_MAX_KNOWN = 1_000


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
        objects.describe,
        config.rounds.deadline_seconds,
        federation.traffic,
    )


class _PublicObjects:
    """The public objects of one hub."""

    def __init__(self, federation: Federation, base: ServedBase) -> None:
        self._database, self._store, self._base = federation.database, federation.store, base
        self._known: OrderedDict[str, tuple[float, PublicObject]] = OrderedDict()

    def among(self, names: Collection[str]) -> set[str]:
        """Return the given sha256 values that identify public objects."""
        found = {name for name in names if self._base.path_of(name) is not None}
        left, others = sorted(set(names) - found), readers.alias()
        with self._database.reading() as tx:
            for start in range(0, len(left), _ROWS_AT_ONCE):
                some = left[start : start + _ROWS_AT_ONCE]
                # Uploaders are among an object's readers, so updates and variants are excluded here even if everyone
                # may read them. A soup remains public if somebody uploads its bytes.
                uploaded = exists().where(others.c.sha256 == readers.c.sha256, others.c.contributor != "*")
                of_all = select(readers.c.sha256).where(
                    readers.c.contributor == "*",
                    readers.c.sha256.in_(some),
                    readers.c.sha256.in_(select(versions.c.soup_sha256)) | ~uploaded,
                )
                found.update(tx.scalars(of_all))
        return found

    def describe(self, sha256: str) -> PublicObject | None:
        """Return the description of a public object; None for any other object."""
        until, known = self._known.get(sha256, (0.0, None))
        if time.monotonic() < until:
            return known
        found = self._read(sha256)
        if found is not None:
            self._known[sha256] = time.monotonic() + _KNOWN_SECONDS, found
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
        return found

    def _read(self, sha256: str) -> PublicObject | None:
        if (path := self._base.path_of(sha256)) is not None:
            return PublicObject(path.stat().st_size, True)
        if sha256 not in self.among({sha256}):
            return None
        try:
            return PublicObject(self._store.size(sha256), False)
        except GymError:
            return None  # it has just been deleted
