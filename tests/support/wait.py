"""Time limit of tests that wait for a process, an answer or a state."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Value = TypeVar("Value")

SECONDS = 240.0
"""Only a hang takes this long, even with ten times more work than cores. A wait ends with its condition."""


def until(condition: Callable[[], Value], what: str = "", seconds: float = SECONDS) -> Value:
    """Poll until ``condition()`` is true, and return its value.

    Raises:
        AssertionError: If it is not true within ``seconds``.
    """
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what or condition} did not happen within {seconds:.0f} s"
        time.sleep(0.02)
    return value
