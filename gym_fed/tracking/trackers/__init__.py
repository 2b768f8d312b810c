"""Trackers, one file each; the file's name is the value under ``tracking``.

Neighbours: imports lines; imported by experiment.
"""
