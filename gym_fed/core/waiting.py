"""What a command does while nothing else of it is shown: a clock on a terminal, lines elsewhere; on standard error."""

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


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Within the block ``what`` goes on. Elsewhere than on a terminal a line comes after 1 s, 2 s, 4 s and so on.

    With ``--json`` nothing is shown in lines: standard error has errors alone then, each a document.

    Args:
        what: Such as ``loading gym-nano``.
    """
    over = threading.Event()
    if wants_json() and not err.is_terminal:
        yield
        return
    show = _clock if err.is_terminal else _lines
    thread = threading.Thread(target=show, args=(what, over), name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _clock(what: str, over: threading.Event) -> None:
    begun = time.monotonic()
    if over.wait(SILENT_SECONDS):
        return
    with err.status(Text(what)) as status:
        while not over.wait(_TICK_SECONDS):
            status.update(Text(f"{what} ({time.monotonic() - begun:.0f} s)"))


def _lines(what: str, over: threading.Event) -> None:
    begun, seconds = time.monotonic(), SILENT_SECONDS
    while not over.wait(begun + seconds - time.monotonic()):
        err.print(f"{what} ({time.monotonic() - begun:.0f} s)", style="dim")
        seconds *= 2
