"""Base models that are missing on this machine: the hub's offer, download, verification and storage."""
