"""Base models missing on this machine: the hub's offer, download, verification and storage."""
