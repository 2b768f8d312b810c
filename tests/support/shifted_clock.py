"""A machine whose clock is off, or is set while a process runs: real processes with ``shifted_clock.c`` preloaded."""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).with_suffix(".c")


def why_not() -> str | None:
    """Why this machine cannot shift a process's clock."""
    if sys.platform != "linux":
        return f"the shim preloads a library: Linux only, not {sys.platform}"
    return None if shutil.which("cc") else "no C compiler (cc) to build the shim with"


class ShiftedClock:
    """The wall clock of the processes that run in ``environment``; the monotonic one is the machine's.

    Args:
        folder: Gets the library and the file with the offset.
        seconds: How far the clock is ahead; negative: behind.
    """

    def __init__(self, folder: Path, seconds: float = 0.0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file, self._library = folder / "offset", folder / "shifted_clock.so"
        self._file.write_bytes(struct.pack("d", seconds))
        command = ["cc", "-O1", "-shared", "-fPIC", "-Wall", "-o", str(self._library), str(SOURCE)]
        subprocess.run([*command, "-ldl", "-lm"], check=True)

    @property
    def environment(self) -> dict[str, str]:
        """For a process and its children."""
        return {**os.environ, "LD_PRELOAD": str(self._library), "SHIFTED_CLOCK": str(self._file)}

    def set(self, seconds: float) -> None:
        """Set the clock of processes that run."""
        with open(self._file, "r+b") as file:  # the same bytes, which they have mapped
            file.write(struct.pack("d", seconds))

    def set_to(self, unix_seconds: float) -> None:
        """Set it to a time."""
        self.set(unix_seconds - time.time())
