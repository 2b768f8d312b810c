"""The contributor's rows: a file, or a small built-in example for a first try."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gym_fed.errors import ErrorCode, GymError

EXAMPLE = "example"
_EXAMPLE_TASKS = ["copy", "reverse", "upper"]
_EXAMPLE_ROWS = 600


@dataclass(frozen=True)
class Data:
    """Rows and where they are from."""

    rows: list[dict[str, Any]]
    description: str
    digest: str


_cache: dict[tuple[str, str, str, int, int], Data] = {}


def load_data(path: str | None, format: str = "auto", columns: str | None = None) -> Data:
    """The rows of a file, or the built-in example for None or ``example``. A file is read once a process.

    Args:
        path: Of the file.
        format: A name in ``gym_fed.kinds.FORMATS``, or ``auto``.
        columns: What the file calls its columns; see ``parse_columns``.

    Raises:
        GymError: ``FILE_NOT_FOUND``; ``DATA_INVALID`` naming the row; ``USAGE`` for columns that cannot be read.
    """
    if path in (None, EXAMPLE):
        if columns:
            raise GymError(ErrorCode.USAGE, "--columns: the built-in example has its own", "give --data FILE")
        return _example()
    file = Path(str(path)).expanduser()
    stamp = file.stat() if file.is_file() else None
    key = (str(file), format, columns or "", stamp.st_mtime_ns if stamp else 0, stamp.st_size if stamp else 0)
    if key not in _cache:
        from gym_fed.data.columns import parse_columns
        from gym_fed.data.reading import load_rows
        from gym_fed.files import file_sha256

        rows = load_rows(file, format, columns=parse_columns(columns))
        _cache.clear()
        _cache[key] = Data(rows, str(file), file_sha256(file))
    return _cache[key]


def _example() -> Data:
    from gym_fed.data.generated import generate_mix

    rows = generate_mix(_EXAMPLE_TASKS, _EXAMPLE_ROWS)
    what = f"built-in example ({', '.join(_EXAMPLE_TASKS)}); give your own with --data FILE"
    return Data(rows, what, EXAMPLE)
