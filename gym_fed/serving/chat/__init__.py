"""The session of `gym chat`, and the writers that generate its answers."""
