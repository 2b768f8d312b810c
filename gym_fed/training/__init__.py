"""Algorithms of the standalone trainer, one file each, in one registry."""
