"""Experiment tracking: an `Experiment` records a run's figures with the trackers that the user names."""
