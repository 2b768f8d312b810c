"""Jobs: commands of ours as detached processes, which a closed tab or a killed workbench leaves running.

Each has a folder with ``job.json`` (the command, and the process by number and start time, since numbers are used
again), ``output.txt`` and, when it has ended, ``status.json``. A workbench that is started later finds them there.
"""

from __future__ import annotations

from pathlib import Path


class Jobs:
    """The jobs of one folder.

    Args:
        folder: Where their folders are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
