"""Trackers, one per file, named by the value under ``tracking``."""
