"""Temporary files of the tests in memory: most tests of hubs wait longer for a disk to sync than they compute."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
"""The folder in memory that Linux has, and other systems do not."""
ROOM = 16 << 30
"""Bytes that must be free: a run of the suite leaves 5 GB there, and its processes take up to 8 GB."""


def use_memory() -> None:
    """Let ``tmp_path`` be in memory, if there is room; ``PYTEST_DEBUG_TEMPROOT`` chooses another folder.

    Every call that syncs a file is made as before, and what a process wrote survives its kill. Tests of power cuts
    record the calls themselves.
    """
    if SHARED_MEMORY.is_dir() and _is_executable() and _free() >= ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(SHARED_MEMORY))


def _is_executable() -> bool:
    """True if programs that a test compiles there can run."""
    return not os.statvfs(SHARED_MEMORY).f_flag & os.ST_NOEXEC


def _free() -> int:
    """Return how many bytes can be written to the folder without displacing what programs need."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    available = 1024 * int(found[1]) if found else 0
    return min(available, shutil.disk_usage(SHARED_MEMORY).free)
