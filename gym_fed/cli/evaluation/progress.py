"""Progress of an evaluation on standard error."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gym_fed.cli.train.progress import bar
from gym_fed.core.console import err

LINE_SECONDS = 5.0
"""How often progress is printed where there is no terminal."""


@contextmanager
def evaluation_progress(unit: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on a terminal, a line every few seconds elsewhere.

    Args:
        unit: What is counted, such as ``requests``.

    Yields:
        A function of how many are done, of how many, and what is computed.
    """
    if err.is_terminal:
        with bar("evaluating") as update:
            yield update
        return
    last = time.monotonic()

    def line(done: int, total: int, what: str) -> None:
        nonlocal last
        if what and time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            err.print(f"{done} of {total} {unit}  {what}")

    yield line
