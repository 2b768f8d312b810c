"""The workbench that all screens share: its folders, jobs and events, and the conversion of values for pages."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.base.models import NANO
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder
from gym_fed.web.events import Feed, PageEvent
from gym_fed.web.jobs import Jobs

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")

JOBS_NAME = ".jobs"
"""The folder of jobs, below the runs."""
MAX_ROWS = 500
"""Maximum number of rows of a list in a response, which also contains the total number of rows."""


MAX_TEXT = 4000
"""Maximum length of a text in a response, in characters."""


MAX_ITEMS = 1000
"""Maximum number of items of a list or mapping in a response."""


_MAX_DEPTH = 12


def plain(value: Any, depth: int = 0) -> Any:
    """Convert any value to a JSON value with truncated valid UTF-8 strings and finite numbers."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        return {text(key): plain(item, depth + 1) for key, item in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, list | tuple) and depth < _MAX_DEPTH:
        return [plain(item, depth + 1) for item in value[:MAX_ITEMS]]
    return text(value)


def text(value: Any) -> str:
    """Return a value as text, truncated; invalid UTF-8 bytes become question marks."""
    try:
        string = value if isinstance(value, str) else str(value)
    except ValueError:  # an integer with too many digits for str()
        string = "a number with too many digits"
    return string[:MAX_TEXT].encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class Workbench:
    """The folders, jobs and events that the screens share.

    Paths in requests must be below these folders; nothing else is read or written.

    Attributes:
        folder: Working directory of `gym webui`, with configs, data and models.
        runs: Folder that contains all runs.
        jobs: Processes started from the pages.
        feed: Events of all screens.
    """

    folder: Path
    runs: Path
    jobs: Jobs
    feed: Feed

    def named(self, path: Path) -> str:
        """Return a path relative to the workbench's folder, where commands run."""
        return str(path.relative_to(self.folder) if self.folder in path.parents else path)

    def inside(self, name: str, *, root: Path | None = None) -> Path:
        """Resolve a requested path below a root folder.

        Raises:
            GymError: ``PERMISSION_DENIED`` for a path that leaves the root by ``..``, a link or a drive.
        """
        base = (root or self.folder).resolve()
        place = resolved(base, name)
        if place is None or (place != base and base not in place.parents):
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"{name!r} is not below {base}",
                "start gym webui in the folder that holds it",
            )
        return place


def resolved(base: Path, name: str) -> Path | None:
    """Resolve a path, which may not exist; None if the system does not accept it."""
    try:
        place = (base / name).resolve()
        place.stat()
    except (FileNotFoundError, NotADirectoryError):
        return place
    except (OSError, ValueError, RuntimeError):  # too long, a null character, or circular links
        return None
    return place


def open_workbench(folder: Path, runs: Path) -> Workbench:
    """Open a workbench in a folder.

    Args:
        folder: Working directory of commands; requests may only read below it.
        runs: Folder of runs, created if it is missing.
    """
    make_folder(runs)
    jobs = Jobs(runs.resolve() / JOBS_NAME, folder.resolve())
    return Workbench(folder.resolve(), runs.resolve(), jobs, Feed(lambda last: (PageEvent("begin", {}),)))


def model_of(workbench: Workbench, name: str) -> str:
    """Return a model's name, or the path of its folder.

    Raises:
        GymError: ``PERMISSION_DENIED`` for a path that leads outside; ``MODEL_NOT_FOUND``.
    """
    if name == NANO:
        return name
    path = workbench.inside(name)
    if path.exists():
        return str(path)
    if not _HUB_NAME.fullmatch(name):
        raise GymError(ErrorCode.MODEL_NOT_FOUND, f"no model {name!r}", "use a folder, or OWNER/NAME")
    return name
