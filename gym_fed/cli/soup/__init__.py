"""`gym soup`."""
