"""What a fuzz target is, and its folder of inputs that are read from files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.fuzz.structure import Mutator


@dataclass(frozen=True)
class Target:
    """One parser under test.

    Args:
        seeds: Valid inputs.
        read: Parses bytes; raises ``GymError`` for invalid input.
        modules: Modules in which coverage is measured.
        max_bytes: Maximum length of an input.
        mutate: Changes a valid input within its structure, so that checksums and lengths do not stop every mutation.
    """

    seeds: Callable[[], list[bytes]]
    read: Callable[[bytes], None]
    modules: tuple[str, ...]
    max_bytes: int = 1 << 14
    mutate: Mutator | None = None


@cache
def scratch() -> Path:
    """Return this process's folder for inputs that are parsed from files; in memory if possible."""
    memory = Path("/dev/shm")
    parent = str(memory) if memory.is_dir() else None
    holder = tempfile.TemporaryDirectory(prefix="gym-fuzz-", dir=parent)
    _HOLDERS.append(holder)
    return Path(holder.name)


_HOLDERS: list[tempfile.TemporaryDirectory[str]] = []


def as_file(name: str, data: bytes) -> Path:
    path = scratch() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def remove_scratch() -> None:
    """Delete this process's input files; needed because the fuzzer exits with ``os._exit``."""
    for holder in _HOLDERS:
        shutil.rmtree(holder.name, ignore_errors=True)
