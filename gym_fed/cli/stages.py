"""Progress of work in stages: a bar on a terminal, lines elsewhere; both on standard error."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gym_fed.core.console import err

Report = Callable[[str, int, int], None]
"""``(stage, done, total)``; ``total`` is 0 where it is not known."""


@contextmanager
def stages() -> Iterator[Report]:
    """What long work reports to: every stage is named when it begins, what is done of it at most every few seconds."""
    if not err.is_terminal:
        yield Lines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=err, transient=True) as shown:
        task = shown.add_task("starting", total=None)
        stage = ""

        def update(name: str, done: int, total: int) -> None:
            nonlocal stage
            if name != stage:
                stage = name
                shown.reset(task, description=name, total=total or None)
            shown.update(task, description=name, completed=done, total=total or None)

        yield update


class Lines:
    """Prints a line for each new stage, and for one that goes on a line every few seconds."""

    def __init__(self, seconds: float | None = None) -> None:
        from gym_fed.base.downloads.terminal import LINE_SECONDS  # slow to import, and every --help would

        self._seconds = LINE_SECONDS if seconds is None else seconds
        self._stage = ""
        self._last = time.monotonic()

    def __call__(self, stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if stage == self._stage and now - self._last < self._seconds:
            return
        is_new = stage != self._stage
        self._stage, self._last = stage, now
        err.print(f"{stage} ..." if is_new or not total else f"{stage}: {done} of {total}", style="dim")


@contextmanager
def ends_well_on_sigterm() -> Iterator[None]:
    """Within the block SIGTERM ends the work as Ctrl-C does: what is half done is removed, and so are its processes."""

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
