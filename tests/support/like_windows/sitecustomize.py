"""With this folder on PYTHONPATH a Python on Linux lacks what Windows lacks, from its first import on.

The project's own code can import no module and finds no name of ``os`` and ``signal`` that Windows has not; loops take
no signal handlers, folders cannot be opened, and ``msvcrt`` locks as there: a byte, exclusively, by the open file.
Other packages look at the name of the system, which stays Linux: they find all that, and what they do on Windows is
not tried.
"""

from __future__ import annotations

import asyncio.unix_events
import builtins
import errno
import fcntl
import os
import shutil
import signal
import struct
import sys
import types
from typing import Any

from lacking import FUNCTIONS, MODULES, SIGNALS  # isort: skip


def _is_for(frame: types.FrameType) -> bool:
    """Whether the code that runs there is the project's or a test's; other packages take this for Linux."""
    return str(frame.f_globals.get("__name__", "")).startswith(("gym_", "tests", "__main__"))


def _import(name: str, *rest: Any, **more: Any) -> Any:
    if name in MODULES and _is_for(sys._getframe(1)):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    return _real_import(name, *rest, **more)


def _locking(descriptor: int, mode: int, num_bytes: int) -> None:
    """``msvcrt.locking``, by locks that belong to the open file as those of Windows do."""
    kind = fcntl.F_UNLCK if mode == _MSVCRT.LK_UNLCK else fcntl.F_WRLCK
    start = os.lseek(descriptor, 0, os.SEEK_CUR)
    try:
        asked = struct.pack("hhqqi", kind, os.SEEK_SET, start, num_bytes, 0)
        fcntl.fcntl(descriptor, _F_OFD_SETLK, asked)
    except BlockingIOError as error:
        raise PermissionError(errno.EACCES, "Permission denied") from error
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        # Linux wants a file that may be written for an exclusive lock, and Windows does not.
        asked = struct.pack("hhqqi", fcntl.F_RDLCK, os.SEEK_SET, start, num_bytes, 0)
        try:
            fcntl.fcntl(descriptor, _F_OFD_SETLK, asked)
        except BlockingIOError as held:
            raise PermissionError(errno.EACCES, "Permission denied") from held


def _take_away(module: types.ModuleType, names: tuple[str, ...]) -> None:
    """Let the project and its tests find the names no more."""
    kept = {name: module.__dict__.pop(name) for name in names}

    def found(name: str) -> Any:
        if name in kept and not _is_for(sys._getframe(1)):
            return kept[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module)

    module.__getattr__ = found  # type: ignore[method-assign]


_F_OFD_SETLK = 37
_MSVCRT: Any = types.ModuleType("msvcrt")
_MSVCRT.LK_UNLCK, _MSVCRT.LK_LOCK, _MSVCRT.LK_NBLCK = 0, 1, 2
_MSVCRT.locking = _locking


def _open(path: Any, flags: int, *rest: Any, **more: Any) -> int:
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
    return _real_open(path, flags, *rest, **more)


def _no_signal_handler(*_: object) -> None:
    raise NotImplementedError


_real_open = os.open
_real_import = builtins.__import__
os.open = _open
shutil._use_fd_functions = False  # type: ignore[attr-defined]
asyncio.unix_events._UnixSelectorEventLoop.add_signal_handler = _no_signal_handler  # type: ignore[assignment]
_take_away(os, FUNCTIONS)
_take_away(signal, SIGNALS)
sys.modules["msvcrt"] = _MSVCRT
builtins.__import__ = _import
