"""The contributor's rows: a file, or a small built-in example for a first try."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLE = "example"
_EXAMPLE_TASKS = ["copy", "reverse", "upper"]
_EXAMPLE_ROWS = 600


@dataclass(frozen=True)
class Data:
    """Rows and where they are from."""

    rows: list[dict[str, Any]]
    description: str
    digest: str


_cache: dict[tuple[str, str, int, int], Data] = {}


def load_data(path: str | None, format: str = "auto") -> Data:
    """The rows of a file, or the built-in example for None or ``example``. A file is read once a process.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``DATA_INVALID`` naming the row.
    """
    if path in (None, EXAMPLE):
        return _example()
    file = Path(str(path)).expanduser()
    stamp = file.stat() if file.is_file() else None
    key = (str(file), format, stamp.st_mtime_ns if stamp else 0, stamp.st_size if stamp else 0)
    if key not in _cache:
        from gym_client.downloads import file_sha256
        from gym_fed.data import load_rows

        rows = load_rows(file, format)
        _cache.clear()
        _cache[key] = Data(rows, str(file), file_sha256(file))
    return _cache[key]


def _example() -> Data:
    from gym_fed.data import generate_mix

    rows = generate_mix(_EXAMPLE_TASKS, _EXAMPLE_ROWS)
    what = f"built-in example ({', '.join(_EXAMPLE_TASKS)}); give your own with --data FILE"
    return Data(rows, what, EXAMPLE)
