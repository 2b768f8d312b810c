"""Trackers, one file each; the file's name is the value under ``tracking``."""
