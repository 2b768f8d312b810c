"""Trackers, one file each: file name = registry name = YAML value. Dropping a file in registers it."""

from gym_fed.tracking.trackers.base import Tracker
from gym_fed.tracking.trackers.registry import get_tracker, tracker_names

__all__ = ["Tracker", "get_tracker", "tracker_names"]
