"""`gym chat`."""
