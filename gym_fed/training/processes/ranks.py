"""This process's place among those that share a run, as torchrun sets it in the environment. Imports no torch."""

from __future__ import annotations

import os


def world_size() -> int:
    """How many processes share the run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process is the one that writes and prints."""
    return int(os.environ.get("RANK", "0")) == 0
