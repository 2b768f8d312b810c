"""`gym data`."""
