"""Progress of long work on standard error: a spinner or bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Protocol

from rich.text import Text

from gym_fed.core.console import err, wants_json
from gym_fed.core.text import readable_bytes

SILENT_SECONDS = 1.0
"""Seconds of silence before the current activity is shown; on a terminal, it is erased when it ends."""

_MAX_SILENT_SECONDS = 30.0
"""Longest interval between the lines of a spinner without a terminal."""

LINE_SECONDS = 5.0
"""Interval of progress lines without a terminal."""

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
        """Add ``count`` to the number of finished parts."""
        self._done += count

    @property
    def stage(self) -> tuple[str, int]:
        """The name, and the number of finished tenths; 0 if the number of parts is unknown."""
        return self._name, 10 * self._done // self._total if self._total else 0

    def describe(self, seconds: float) -> str:
        """Return ``loading gym-nano (3 s)``, or ``measuring: 12 of 88 (3 s)`` if the number of parts is known."""
        count = f": {self._done:,} of {self._total:,}" if self._total else ""
        return f"{self._name}{count} ({seconds:.0f} s)"


@contextmanager
def spinner(name: str, hint: str = "") -> Iterator[Activity]:
    """Show ``name`` while the block runs; without a terminal, print lines after 1, 2, 4, 8, 16 and 32 s, then every
    30 s, and, at most every 5 s, after each tenth of the work and when its name changes.

    With ``--json`` no lines are printed, since standard error then contains only JSON errors.

    Args:
        name: Name of the work, such as ``loading gym-nano``.
        hint: How to avoid the work; shown in the first line, and all the time on a terminal.

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
    begun, times, stage = time.monotonic(), line_times(), activity.stage
    printed, due = begun, begun + next(times)
    while not over.wait(max(0.0, min(_TICK_SECONDS, due - time.monotonic()))):
        now = time.monotonic()
        if now < due and (activity.stage == stage or now < printed + LINE_SECONDS):
            continue
        printed, stage = now, activity.stage
        while due <= now:
            due = begun + next(times)
        err.print(f"{activity.describe(now - begun)}{hint}", style="dim")
        hint = ""


def line_times() -> Iterator[float]:
    """Yield the seconds after which a spinner without a terminal prints its lines."""
    seconds = SILENT_SECONDS
    while True:
        yield seconds
        seconds = min(2 * seconds, seconds + _MAX_SILENT_SECONDS)


Unit = Literal["items", "bytes"]


class Update(Protocol):
    """Report progress.

    Args:
        done: Number of finished items or bytes.
        total: Total number; None or 0 if unknown or unchanged.
        note: Text after the bar, such as a loss.
        description: Name of a new stage, which restarts the count; None for the same stage.
    """

    def __call__(
        self, done: int, total: int | None = None, *, note: str = "", description: str | None = None
    ) -> None: ...


@contextmanager
def progress_bar(
    description: str = "",
    total: int | None = None,
    *,
    unit: Unit = "items",
    shown: bool = True,
    lines: bool = True,
    keep: bool = False,
) -> Iterator[Update]:
    """Show the progress of the work in the block.

    Args:
        description: Name of the work, such as ``downloading``; "" if the first update names a stage.
        total: Number of items or bytes, if known.
        unit: Unit of the count.
        shown: True to show the progress.
        lines: True to print lines if there is no terminal.
        keep: True to leave the bar on the screen at the end. Such a bar shows no elapsed time; its notes do.
    """
    if not shown or not (lines or err.is_terminal):
        yield _show_nothing
        return
    if not err.is_terminal:
        yield _Lines(description, total, unit)
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns: list[ProgressColumn] = [
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
    ]
    columns += [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    if not keep:
        is_open_ended = total is None and unit == "items"
        columns.append(TimeElapsedColumn() if is_open_ended else TimeRemainingColumn())
    columns.append(TextColumn("{task.fields[note]}", markup=False))
    with Progress(*columns, console=err, transient=not keep) as bar:
        stage = description
        task = bar.add_task(stage, total=total, note="", visible=False)

        def update(
            done: int, total: int | None = None, *, note: str = "", description: str | None = None
        ) -> None:
            nonlocal stage, task
            if description is not None and description != stage:
                stage = description
                bar.remove_task(task)
                task = bar.add_task(stage, total=None, note="")
            bar.update(task, completed=done, total=total or None, note=note, visible=True)

        yield update


def _show_nothing(
    done: int, total: int | None = None, *, note: str = "", description: str | None = None
) -> None:
    """Ignore an update."""


class _Lines:
    """Print a line for each new stage, and then one every few seconds."""

    def __init__(self, stage: str, total: int | None, unit: Unit) -> None:
        self._stage, self._total, self._unit = stage, total, unit
        self._printed_at = time.monotonic()

    def __call__(
        self, done: int, total: int | None = None, *, note: str = "", description: str | None = None
    ) -> None:
        now = time.monotonic()
        if description is not None and description != self._stage:
            self._stage, self._total, self._printed_at = description, total, now
            err.print(f"{description} ...", style="dim", markup=False)
            return
        self._total = total or self._total
        if now - self._printed_at < LINE_SECONDS:
            return
        self._printed_at = now
        amount = self._amount(done) + (f" of {self._amount(self._total)}" if self._total else "")
        err.print(f"{self._stage}: {amount}{f'  {note}' if note else ''}", style="dim", markup=False)

    def _amount(self, count: int) -> str:
        return readable_bytes(count) if self._unit == "bytes" else f"{count:,}"
