"""Serve the verified copy of another hub, read-only."""
