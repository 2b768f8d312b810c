"""`gym train` and `gym tune`."""
