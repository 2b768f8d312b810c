"""The home folder, its keys, and the pinned hubs."""
