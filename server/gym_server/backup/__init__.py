"""Backup, restore, check and garbage collection of a hub's folder."""
