"""This process's rank among those of a run, from torchrun's environment variables. Imports no torch."""

from __future__ import annotations

import os


def world_size() -> int:
    """Return the number of processes that share the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Return True if this process is the one that writes and prints."""
    return int(os.environ.get("RANK", "0")) == 0
