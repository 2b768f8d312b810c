"""The folders of recent runs of this account, so that pages find runs wherever they are written."""

from __future__ import annotations

import json
from pathlib import Path

from gym_fed.core.files import default_home, make_folder, write_atomically

MAX_FOLDERS = 200
_FILE = "recent-runs.json"
_MAX_BYTES = 2**20


def remember_run(folder: Path) -> None:
    """Put a folder first in the list of recent runs, which keeps ``MAX_FOLDERS``.

    Raises:
        OSError: If the list cannot be written.
        RuntimeError: If this account has no home folder.
    """
    place = folder.resolve()
    folders = [place, *(other for other in _listed() if other != place)][:MAX_FOLDERS]
    make_folder(default_home())
    write_atomically(default_home() / _FILE, json.dumps([str(one) for one in folders], indent=1).encode())


def recent_runs() -> list[Path]:
    """Return the folders of recent runs that still hold a run, newest first."""
    return [folder for folder in _listed() if (folder / "run.json").is_file()]


def _listed() -> list[Path]:
    """Return the list; empty if there is none, or if its content is not a list."""
    try:
        file = default_home() / _FILE
        if not file.is_file() or file.stat().st_size > _MAX_BYTES:
            return []
        folders = json.loads(file.read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # a convenience that is written again; or there is no home folder
        return []
    named = folders if isinstance(folders, list) else []
    return [
        Path(one) for one in named if isinstance(one, str) and "\x00" not in one and Path(one).is_absolute()
    ]
