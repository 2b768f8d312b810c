"""A spinner on standard error with elapsed seconds and a count; lines if there is no terminal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.text import Text

from gym_fed.core.console import err, wants_json

SILENT_SECONDS = 1.0
"""Silence after which the current activity is printed: on a terminal with the seconds, and erased when it ends."""

_TICK_SECONDS = 0.25


class Activity:
    """The current work and its progress.

    Args:
        name: Name of the work, such as ``loading gym-nano``.
    """

    def __init__(self, name: str) -> None:
        self._name, self._done, self._total = name, 0, 0

    def report(self, done: int, total: int, name: str | None = None) -> None:
        """Show that ``done`` of ``total`` parts are finished, and rename the work if ``name`` is given."""
        self._name, self._done, self._total = name or self._name, done, total

    def add(self, count: int) -> None:
        """Count ``count`` more finished parts."""
        self._done += count

    def describe(self, seconds: float) -> str:
        """Return ``loading gym-nano (3 s)``, or ``measuring: 12 of 88 (3 s)`` if the number of parts is known."""
        count = f": {self._done:,} of {self._total:,}" if self._total else ""
        return f"{self._name}{count} ({seconds:.0f} s)"


@contextmanager
def spinner(name: str, hint: str = "") -> Iterator[Activity]:
    """Show ``name`` while the block runs; without a terminal, print lines after 1 s, 2 s, 4 s and so on.

    With ``--json`` no lines are printed, since standard error then contains only JSON errors.

    Args:
        name: Name of the work, such as ``loading gym-nano``.
        hint: How to avoid the work; shown in the first line, and permanently on a terminal.

    Yields:
        The activity, to report progress.
    """
    over, activity = threading.Event(), Activity(name)
    if wants_json() and not err.is_terminal:
        yield activity
        return
    show = _clock if err.is_terminal else _lines
    arguments = (activity, over, f"; {hint}" if hint else "")
    thread = threading.Thread(target=show, args=arguments, name="spinner", daemon=True)
    thread.start()
    try:
        yield activity
    finally:
        over.set()
        thread.join()


def _clock(activity: Activity, over: threading.Event, hint: str) -> None:
    begun = time.monotonic()
    if over.wait(SILENT_SECONDS):
        return
    with err.status(Text(activity.describe(0))) as status:
        while not over.wait(_TICK_SECONDS):
            status.update(Text(f"{activity.describe(time.monotonic() - begun)}{hint}"))


def _lines(activity: Activity, over: threading.Event, hint: str) -> None:
    begun, seconds = time.monotonic(), SILENT_SECONDS
    while not over.wait(begun + seconds - time.monotonic()):
        err.print(f"{activity.describe(time.monotonic() - begun)}{hint}", style="dim")
        hint = ""
        seconds *= 2
