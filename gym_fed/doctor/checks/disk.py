"""Check free disk space for work and temporary files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gym_fed.doctor.check import Check, Finding, Level

GIB = 1 << 30
# Below the first limit, checkpoints of a small model fill the disk in a few runs; below the second, in one run.
ROOMY_BYTES = 5 * GIB
MIN_BYTES = GIB // 2


class Disk(Check):
    """Check the disks of the current and the temporary folder."""

    def findings(self) -> Iterator[Finding]:
        yield judge_disk("disk: here", Path.cwd(), shutil.disk_usage(Path.cwd()).free)
        temporary = Path(tempfile.gettempdir())
        yield judge_disk("disk: temporary", temporary, shutil.disk_usage(temporary).free)


def judge_disk(name: str, folder: Path, free_bytes: int) -> Finding:
    """Convert the free space of a folder's disk to a finding."""
    seen = f"{free_bytes / GIB:.1f} GiB free at {folder}"
    if free_bytes >= ROOMY_BYTES:
        return Finding(name, Level.OK, seen)
    level = Level.WARN if free_bytes >= MIN_BYTES else Level.FAIL
    remedy = "delete old runs, or work on another disk (TMPDIR moves the temporary folder)"
    return Finding(name, level, seen, remedy)
