"""The figures of a run, kept on disk and told to whom the user names: one `Experiment`, one tracker a file."""

from gym_fed.tracking.experiment import Experiment
from gym_fed.tracking.trackers import Tracker, get_tracker, tracker_names

__all__ = ["Experiment", "Tracker", "get_tracker", "tracker_names"]
