"""Platform differences: file flags and reads, users, signals and clocks."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial

O_NONBLOCK: int = getattr(os, "O_NONBLOCK", 0)
"""Flag to open a named pipe without waiting for a writer; 0 on systems without named pipes."""
O_BINARY: int = getattr(os, "O_BINARY", 0)
"""Flag that prevents the conversion of line ends on Windows. No flag against inheritance is needed, since Python's
descriptors are never inherited."""
SIGKILL: int = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Signal that kills a process; on Windows, every termination is a kill."""
_M_ARENA_MAX = -8
"""From glibc's malloc.h."""


def opens_folders() -> bool:
    """Return True if folders can be opened, and so locked and synced; False on Windows."""
    return hasattr(os, "O_DIRECTORY")


def steady_seconds() -> float:
    """Return the time of a clock that cannot be set and that includes sleep, in seconds.

    ``time.monotonic`` stops during sleep on Linux and macOS. ``CLOCK_BOOTTIME`` of Linux and ``CLOCK_MONOTONIC`` of
    macOS include sleep, and so does ``time.monotonic`` on Windows.
    """
    number = _steady_clock()
    return time.monotonic() if number is None else time.clock_gettime(number)


@cache
def _steady_clock() -> int | None:
    """Return the id of the system clock that includes sleep; None if ``time.monotonic`` does."""
    if sys.platform == "darwin":
        return time.CLOCK_MONOTONIC
    return getattr(time, "CLOCK_BOOTTIME", None)


def read_at(descriptor: int, num_bytes: int, place: int) -> bytes:
    """Read bytes of an open file at offset ``place``."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, num_bytes, place)
    os.lseek(descriptor, place, os.SEEK_SET)
    return os.read(descriptor, num_bytes)


def own_user() -> int | None:
    """Return the uid of this process; None on Windows."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def on_stop_signals(call: Callable[[int], object]) -> Callable[[], None]:
    """Call a function on SIGINT and SIGTERM, in the running event loop of the main thread.

    Args:
        call: Called with the signal number.

    Returns:
        A function that restores the previous signal handlers.
    """
    loop = asyncio.get_running_loop()
    undo: list[Callable[[], object]] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, call, number)
            undo.append(partial(loop.remove_signal_handler, number))
        except NotImplementedError:  # Windows
            before = signal.signal(number, lambda number, _: loop.call_soon_threadsafe(call, number))
            undo.append(partial(signal.signal, number, before))

    def release() -> None:
        for one in undo:
            one()

    return release


@contextmanager
def memory_given_back() -> Iterator[None]:
    """Call ``give_back_memory`` at the end of the block or the decorated function."""
    try:
        yield
    finally:
        give_back_memory()


def give_back_memory() -> None:
    """Return freed memory to the system; after training a 135M model, glibc keeps 0.8 GB."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def limit_heaps(number: int = 2) -> None:
    """Let all threads share this many heaps of glibc. Call it before threads start.

    By default glibc makes up to eight heaps per core, and ``give_back_memory`` cannot return freed memory that is
    scattered over them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, number)
