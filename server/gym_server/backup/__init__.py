"""Backup, restore, check and clean-up of a hub's folder."""
