"""Folders that are made once for all workers of a run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock


def made_once(
    factory: pytest.TempPathFactory, worker_id: str, name: str, make: Callable[[Path], None]
) -> Path:
    """Return the folder ``name`` that all workers share; the first caller makes it.

    The folder gets its name when it is complete: if ``make`` fails, the next caller starts over.
    """
    root = factory.getbasetemp()
    folder = (root if worker_id == "master" else root.parent) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            half_made = folder.with_name(f"{name}.half-made")
            shutil.rmtree(half_made, ignore_errors=True)
            half_made.mkdir()
            make(half_made)
            half_made.rename(folder)
    return folder
