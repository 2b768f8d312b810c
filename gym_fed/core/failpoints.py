"""Failpoints for tests: ``GYM_FAILPOINTS=before-commit`` kills the process at that point with SIGKILL.

``name:3`` acts on the third call. ``name=ACTION`` selects a different action: ``raise``, ``enospc`` (the disk is full),
``eio`` (the disk fails) or ``delay2.5`` (seconds). Without the variable, a failpoint costs one dictionary
lookup.
"""

from __future__ import annotations

import errno
import os
import sys
import time

from gym_fed.core.portable import SIGKILL


def _parse(part: str) -> tuple[str, tuple[int, str]]:
    where, _, action = part.partition("=")
    name, _, count = where.partition(":")
    return name, (int(count or 1), action)


_armed = dict(_parse(part) for part in os.environ.get("GYM_FAILPOINTS", "").split(",") if part)


def failpoint(name: str) -> None:
    """Kill this process, raise or sleep if the environment requests it. A kill flushes nothing and rolls nothing
    back."""
    if name not in _armed:
        return
    calls, action = _armed[name]
    _armed[name] = calls - 1, action
    if calls == 1:
        _act(name, action)


def _act(name: str, action: str) -> None:
    print(f"failpoint {name}={action}", file=sys.stderr, flush=True)  # tests check that it was reached
    if action in ("enospc", "eio"):
        number = getattr(errno, action.upper())
        raise OSError(number, os.strerror(number), name)
    if action == "raise":
        raise RuntimeError(f"failpoint {name}")
    if action.startswith("delay"):
        time.sleep(float(action.removeprefix("delay")))
    elif action:
        raise ValueError(f"GYM_FAILPOINTS: {name} has the unknown action {action}")
    else:
        os.kill(os.getpid(), SIGKILL)
