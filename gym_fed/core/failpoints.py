"""Failpoints for tests: ``GYM_FAILPOINTS=before-commit`` kills the process at that point with SIGKILL.

``name:3`` kills at the third call. Without the variable, a failpoint costs one dictionary lookup.
"""

from __future__ import annotations

import os

from gym_fed.core.portable import SIGKILL

_armed = {
    name: int(count or 1)
    for name, _, count in (
        part.partition(":") for part in os.environ.get("GYM_FAILPOINTS", "").split(",") if part
    )
}


def failpoint(name: str) -> None:
    """Kill this process if the environment requests it; nothing is flushed, closed or rolled back."""
    if name not in _armed:
        return
    _armed[name] -= 1
    if _armed[name] == 0:
        os.kill(os.getpid(), SIGKILL)
