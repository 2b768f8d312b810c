"""The home folder, its keys, and which hubs are trusted at which address."""
