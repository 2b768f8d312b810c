"""A disk of a few megabytes (tmpfs), which a test fills and empties."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class SmallDisk:
    """A mounted disk; ``fill`` leaves so many bytes of it free."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._filler = folder, folder / "filler"

    def fill(self, leave_bytes: int = 0) -> None:
        """Write a file that takes the rest."""
        with open(self._filler, "wb", buffering=0) as file:
            while (free := shutil.disk_usage(self.folder).free - leave_bytes) > 0:
                file.write(b"x" * min(free, 1 << 20))

    def make_room(self) -> None:
        """Remove it."""
        self._filler.unlink()


def why_not() -> str | None:
    """Why this user cannot mount one."""
    if sys.platform != "linux" or shutil.which("mount") is None:
        return "mounts a tmpfs: Linux only"
    probe = ["unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"]
    return (
        None if subprocess.run(probe, capture_output=True).returncode == 0 else "only root may mount a tmpfs"
    )


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[SmallDisk]:
    """Mounted at ``folder`` while the block runs."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True)
    try:
        yield SmallDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
