"""Ctrl-C for long work: the first ends it after the current step, the second at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_ctrl_c(keeping: str = " with a checkpoint") -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C ends the run after the current step, ``keeping`` something; the second stops at once."""
    requested = False

    def handler(number: int, frame: object) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        # Not through the console: the signal may have come while it was writing.
        os.write(
            sys.stderr.fileno(), f"\nstopping after this step{keeping}; Ctrl-C again stops at once\n".encode()
        )

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield lambda: requested
    finally:
        signal.signal(signal.SIGINT, before)
