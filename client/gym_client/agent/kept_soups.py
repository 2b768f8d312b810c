"""The soups in a home's object cache, by hub: a hub's next task needs those of its last one, and no others."""

from __future__ import annotations

import json
from collections.abc import Collection

from gym_client.hub.transfers import ObjectCache, partial_file
from gym_client.identity.home import Home
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.json_files import read_object


class KeptSoups:
    """The names of the kept soups, in ``soups.json``. Changes require the home's lock.

    Args:
        home: The home with the object cache.
    """

    def __init__(self, home: Home) -> None:
        self._path, self._cache = home.folder / "soups.json", ObjectCache(home.objects)

    def names(self, server: str | None = None) -> set[str]:
        """Return the SHA-256 of the soups of one hub, or of all."""
        found = self._read()
        return {name for kept in ([found.get(server, [])] if server else found.values()) for name in kept}

    def replace(self, server: str, names: Collection[str]) -> None:
        """Record the soups of a hub's newest task; delete its earlier ones, unless another hub has the same.

        Raises:
            GymError: ``STATE_CORRUPT`` if the file is damaged; ``USAGE`` for a name that is not a SHA-256.
        """
        kept = self._read()
        before = kept.pop(server, [])
        if set(before) == set(names):
            return
        others = {name for kept_by_other in kept.values() for name in kept_by_other}
        for name in {*before} - {*names} - others:
            path = self._cache.path(name)
            path.unlink(missing_ok=True)
            partial_file(path).unlink(missing_ok=True)
        found = {**kept, server: sorted(names)} if names else kept
        write_atomically(self._path, json.dumps(found).encode())

    def _read(self) -> dict[str, list[str]]:
        if not self._path.exists():
            return {}
        remedy = "delete the file; soups that it lists stay in objects/"
        found = read_object(self._path, ErrorCode.STATE_CORRUPT, remedy)
        if not all(
            isinstance(names, list) and all(isinstance(name, str) for name in names)
            for names in found.values()
        ):
            raise GymError(ErrorCode.STATE_CORRUPT, f"{self._path} is not a list of soups by hub", remedy)
        return found
