"""Experiment tracking: an ``Experiment`` records a run with the trackers that the user names."""
