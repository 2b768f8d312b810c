"""Serve a verified, read-only copy of another hub."""
