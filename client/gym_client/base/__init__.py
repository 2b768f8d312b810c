"""Base models that this machine lacks: offered by a hub, fetched, checked and stored."""
