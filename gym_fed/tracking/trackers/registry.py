"""Finds trackers by file name. To add one, drop ``NAME.py`` with one subclass of ``Tracker`` into this folder."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from gym_fed.errors import ErrorCode, GymError
from gym_fed.tracking.trackers.base import Tracker

_NEVER = {"base", "registry"}


def tracker_names() -> list[str]:
    """Every registered tracker, in alphabetical order."""
    return sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name not in _NEVER)


def get_tracker(name: str) -> Tracker:
    """A new tracker of ``NAME.py``, whose package is there.

    Raises:
        GymError: ``CONFIG_INVALID`` when there is none, ``MISSING_DEPENDENCY`` when its package is not installed.
    """
    if name not in tracker_names():
        known = ", ".join(tracker_names())
        raise GymError(ErrorCode.CONFIG_INVALID, f"tracking: {name!r} is unknown", f"one of {known}")
    module = importlib.import_module(f"gym_fed.tracking.trackers.{name}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Tracker) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__file__} must hold exactly one Tracker, found {len(found)}")
    tracker: Tracker = found[0]()
    tracker.check()
    return tracker
