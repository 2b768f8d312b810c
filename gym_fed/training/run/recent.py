"""Remember the folders of recent runs, so that web pages can list runs anywhere on the disk."""

from __future__ import annotations

import json
from pathlib import Path

from gym_fed.core.files import default_home, make_folder, write_atomically

MAX_FOLDERS = 200
_FILE = "recent-runs.json"
_MAX_BYTES = 2**20


def remember_run(folder: Path, file: Path | None = None) -> None:
    """Add a folder to the front of the list of recent runs, which contains at most ``MAX_FOLDERS``.

    Args:
        folder: The folder of a run.
        file: The file of the list; by default, that of this user account.

    Raises:
        OSError: If the list cannot be written.
        RuntimeError: If this account has no home folder.
    """
    place = folder.resolve()
    file = default_home() / _FILE if file is None else file
    folders = [place, *(other for other in _listed(file) if other != place)][:MAX_FOLDERS]
    make_folder(file.parent)
    write_atomically(file, json.dumps([str(other) for other in folders], indent=1).encode())


def recent_runs(file: Path | None = None) -> list[Path]:
    """Return the listed folders that still contain a run, newest first; ``file`` defaults to this user's list."""
    return [folder for folder in _listed(file) if (folder / "run.json").is_file()]


def _listed(file: Path | None) -> list[Path]:
    """Return the list; empty if it does not exist or its content is invalid."""
    try:
        file = default_home() / _FILE if file is None else file
        if not file.is_file() or file.stat().st_size > _MAX_BYTES:
            return []
        folders = json.loads(file.read_text(encoding="utf-8"))
    except (
        OSError,
        ValueError,
        RuntimeError,
    ):  # the list is only a convenience; or there is no home folder
        return []
    names = [name for name in folders if isinstance(name, str)] if isinstance(folders, list) else []
    return [Path(name) for name in names if "\x00" not in name and Path(name).is_absolute()]
