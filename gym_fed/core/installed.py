"""Load objects from the entry points of installed packages."""

from __future__ import annotations

import importlib.metadata
import logging
from typing import Any

from gym_fed.core.text import plain

log = logging.getLogger("gym_fed")


def load_installed(group: str) -> tuple[Any, ...]:
    """Return the objects of the group's entry points, sorted by name.

    Entry points that cannot be imported are skipped with a warning, since these groups are loaded for every config.
    """
    loaded = []
    for point in sorted(importlib.metadata.entry_points(group=group), key=lambda point: point.name):
        try:
            loaded.append(point.load())
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a module of another package may raise anything
            package = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
            log.warning(
                "left out: %s %r of %s cannot be imported: %s; repair or remove that package",
                group,
                point.name,
                plain(package),
                plain(repr(error)),
            )
    return tuple(loaded)
