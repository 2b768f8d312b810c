"""What every screen of the workbench is made from: the folders it may look into, and its jobs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder
from gym_fed.web.events import Feed, PageEvent
from gym_fed.webui.jobs import Jobs

JOBS_NAME = ".jobs"
"""Of the folder of jobs, below that of runs."""
MAX_ROWS = 500
"""Of one list in one answer; a list says how many there are."""


@dataclass(frozen=True)
class Workbench:
    """One machine's folders. Paths in requests are below these roots, and nothing else is read or written.

    Attributes:
        folder: Where `gym webui` was started; configs, data and models lie below it.
        runs: Run folders lie below it.
        jobs: Processes that were started from the pages.
        feed: Events of all screens.
    """

    folder: Path
    runs: Path
    jobs: Jobs
    feed: Feed

    def named(self, path: Path) -> str:
        """A path as commands get it, which run in the workbench's folder."""
        return str(path.relative_to(self.folder) if self.folder in path.parents else path)

    def inside(self, name: str, *, root: Path | None = None) -> Path:
        """A path of a request, below a root.

        Raises:
            GymError: ``PERMISSION_DENIED`` for one that leads out of it, by ``..``, a link or a drive.
        """
        base = (root or self.folder).resolve()
        found = resolved(base, name)
        if found is None or (found != base and base not in found.parents):
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"{name!r} is not below {base}",
                "start gym webui in the folder that holds it",
            )
        return found


def resolved(base: Path, name: str) -> Path | None:
    """Where a path leads, whether or not something is there; None for one that no system call takes."""
    try:
        found = (base / name).resolve()
        found.stat()
    except (FileNotFoundError, NotADirectoryError):
        return found
    except (OSError, ValueError, RuntimeError):  # too long, a null character, a circle of links
        return None
    return found


def open_workbench(folder: Path, runs: Path) -> Workbench:
    """The workbench of a folder.

    Args:
        folder: Where commands run, and below which they may look.
        runs: The folder of runs, made if it is missing.
    """
    make_folder(runs)
    jobs = Jobs(runs.resolve() / JOBS_NAME, folder.resolve())
    return Workbench(folder.resolve(), runs.resolve(), jobs, Feed(lambda last: (PageEvent("begin", {}),)))
