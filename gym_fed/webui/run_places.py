"""Find runs inside and outside the workbench's folder of runs, and name their folders in URLs.

A run below the folder of runs is named by its relative path; any other is named by ``@`` and its absolute path. Other
runs are those in ``saves/``, where LLaMA-Factory writes, those that an operator has added, and the recent ones of `gym
train` on this account. Only operators see the recent runs, since these belong to no workbench.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.training.run.recent import recent_runs, remember_run
from gym_fed.webui.workbench import Workbench, resolved, text

OUTSIDE = "@"
SAVES = "saves"
ADDED_NAME = "added_runs.json"
"""File, below the folder of runs, with the list of runs that an operator has added."""
MAX_PATH = 1000
_PRUNED = ("checkpoints", "best", "tensorboard")
_MAX_FOLDERS = 20_000


class RunPlaces:
    """The folders of runs of a workbench.

    Args:
        workbench: The workbench.
    """

    def __init__(self, workbench: Workbench) -> None:
        self._workbench = workbench
        self._lock = threading.Lock()

    def folders(self) -> Iterator[Path]:
        """Yield the folders of all runs, each once; those below the folder of runs come first."""
        seen = set()
        for root in (self._workbench.runs, self._workbench.folder / SAVES):
            for folder in _runs_below(root):
                seen.add(folder)
                yield folder
        yield from (folder for folder in dict.fromkeys(self._added() + self._recent()) if folder not in seen)

    def path_of(self, folder: Path) -> str:
        """Return the name of a run's folder in URLs."""
        runs = self._workbench.runs
        return text(
            folder.relative_to(runs).as_posix() if runs in folder.parents else f"{OUTSIDE}{folder.as_posix()}"
        )

    def is_shared(self, path: str) -> bool:
        """Return True if viewers see the run with this name, too."""
        outside = path.removeprefix(OUTSIDE)
        if outside == path or not Path(outside).is_absolute():
            return True
        folder = Path(outside)
        return (self._workbench.folder / SAVES).resolve() in folder.parents or folder in self._added()

    def folder_of(self, path: str, *, operator: bool = True) -> Path:
        """Return the folder of a run.

        Args:
            path: Name of the run.
            operator: True to also accept the recent runs of this account.

        Raises:
            GymError: ``NOT_FOUND``; ``PERMISSION_DENIED`` for a path outside the known folders.
        """
        if not path or len(path) > MAX_PATH:
            raise GymError(ErrorCode.NOT_FOUND, "there is no such run", "see the list of runs")
        outside = path.removeprefix(OUTSIDE)
        if outside == path or not Path(outside).is_absolute():
            return self._workbench.inside(path, root=self._workbench.runs)
        folder = resolved(Path(outside), ".")
        if folder is None or not (
            self.is_shared(f"{OUTSIDE}{folder}") or (operator and folder in self._recent())
        ):
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"{text(outside)} is not among the known runs",
                "add its path on the runs page",
            )
        return folder

    def add(self, path: str) -> Path:
        """Record the folder of a run that an operator names, which viewers then see, and return it.

        Raises:
            GymError: ``NOT_FOUND`` if the folder contains no run.
        """
        folder = resolved(self._workbench.folder, os.path.expanduser(path))
        if folder is None or not (folder / "run.json").is_file():
            raise GymError(
                ErrorCode.NOT_FOUND,
                f"{text(path)} contains no run of gym train",
                "use the output_dir of a run, the folder with run.json",
            )
        with self._lock:
            remember_run(folder, self._workbench.runs / ADDED_NAME)
        return folder

    def _added(self) -> list[Path]:
        return self._outside(recent_runs(self._workbench.runs / ADDED_NAME))

    def _recent(self) -> list[Path]:
        return self._outside(recent_runs())

    def _outside(self, folders: list[Path]) -> list[Path]:
        runs = self._workbench.runs
        return [folder for folder in folders if folder != runs and runs not in folder.parents]


def _runs_below(root: Path) -> Iterator[Path]:
    for number, (place, folders, files) in enumerate(os.walk(root)):
        if number >= _MAX_FOLDERS:
            return
        folders[:] = sorted(name for name in folders if name not in _PRUNED and not name.startswith("."))
        if "run.json" in files:
            yield Path(place)
