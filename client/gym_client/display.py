"""Output of the agent: progress bars on a terminal, plain lines otherwise, JSON lines with ``--json``."""

from __future__ import annotations

import json
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.status import Status
from rich.text import Text

from gym_fed.core.text import plain, readable_bytes

MAX_NEWS = 1000
"""Maximum characters of one reported line, since much of it comes from the hub."""

_LINES_PER_PHASE = 10
_SILENT_SECONDS = 1.5
"""Seconds of silence after which the current activity is printed, repeatedly on a terminal, else at doubling
intervals."""
_TICK_SECONDS = 0.25
_LABELS = {
    "fetch": "fetching",
    "base": "base model",
    "train": "training",
    "region": "regional rounds",
    "distill": "distilling",
    "encode": "encoding",
    "upload": "uploading",
    "ledger": "ledger",
}


def _amount(phase: str, done: int, total: int) -> str:
    """Format the progress of a phase: steps, or bytes for transfers."""
    if phase in ("fetch", "base", "upload"):
        return f"{readable_bytes(done)} of {readable_bytes(total)}"
    return f"{done}/{total}"


class Display:
    """The interface of displays. The base class displays nothing."""

    def report(self, event: str, text: str, /, **fields: Any) -> None:
        """Report an event, with a name and fields for programs and a text for people."""

    def progress(self, phase: str, done: int, total: int, loss: float | None) -> None:
        """Report the progress of a phase, which ends when ``done == total``."""

    def busy(self, activity: str) -> None:
        """Set the current activity, which is shown if it takes long; an empty string clears it."""

    def still(self, activity: str, seconds: float) -> None:
        """Print an activity that has run for ``seconds`` without other output."""

    def close(self) -> None:
        """Restore the terminal."""


class EventReporter(Display):
    """Forwards all events, and prints the current activity after ``_SILENT_SECONDS`` of silence.

    Args:
        inner: The display that events are forwarded to.
        often: True to repeat the activity on every tick, for a terminal; False to repeat it at doubling intervals.
        clock: Returns monotonic time in seconds.
    """

    def __init__(self, inner: Display, often: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner, self._often, self._clock = inner, often, clock
        self._lock = threading.RLock()
        self._what, self._since, self._next = "", 0.0, _SILENT_SECONDS
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def report(self, event: str, text: str, /, **fields: Any) -> None:
        with self._lock:
            self._inner.report(event, text, **fields)
            self._restart(self._what)

    def progress(self, phase: str, done: int, total: int, loss: float | None) -> None:
        with self._lock:
            self._restart(
                f"{_LABELS.get(phase, phase)} {_amount(phase, done, total)}" if done < total else ""
            )
            self._inner.progress(phase, done, total, loss)

    def busy(self, activity: str) -> None:
        with self._lock:
            self._restart(activity)
            self._inner.busy(activity)
            if activity and self._thread is None and not self._closed.is_set():
                self._thread = threading.Thread(target=self._watch, name="narrator", daemon=True)
                self._thread.start()

    def still(self, activity: str, seconds: float) -> None:
        with self._lock:
            self._inner.still(activity, seconds)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            self._restart("")
            self._inner.close()

    def _restart(self, activity: str) -> None:
        self._what, self._since, self._next = activity, self._clock(), _SILENT_SECONDS

    def report_activity(self) -> None:
        """Print the current activity if nothing was printed for long enough."""
        with self._lock:
            seconds = self._clock() - self._since
            if self._what and seconds >= self._next:
                self._next = self._next if self._often else 2 * self._next
                self._inner.still(self._what, seconds)

    def _watch(self) -> None:
        while not self._closed.wait(_TICK_SECONDS):
            self.report_activity()


class PhaseLines:
    """Selects the progress lines of a phase to print: about ten, plus some after silence at doubling intervals."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._printed, self._at, self._next = ("", -1), clock(), _SILENT_SECONDS

    def wants(self, phase: str, done: int, total: int) -> bool:
        step, now = (phase, _LINES_PER_PHASE * done // total if total else 0), self._clock()
        if step == self._printed and now - self._at < self._next:
            return False
        self._next = 2 * self._next if step == self._printed else _SILENT_SECONDS
        self._printed, self._at = step, now
        return True


class PlainDisplay(Display):
    """A display that prints plain lines to standard error."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._lines = PhaseLines()

    def report(self, event: str, text: str, /, **fields: Any) -> None:
        self._console.print(plain(text, MAX_NEWS))

    def still(self, activity: str, seconds: float) -> None:
        self._console.print(f"{plain(activity, MAX_NEWS)} ({seconds:.0f} s)")

    def progress(self, phase: str, done: int, total: int, loss: float | None) -> None:
        if not self._lines.wants(phase, done, total):
            return
        suffix = "" if loss is None else f", loss {loss:.4f}"
        self._console.print(f"{_LABELS.get(phase, phase)} {_amount(phase, done, total)}{suffix}")


class JsonDisplay(Display):
    """A display that prints JSON lines to standard output."""

    def __init__(self) -> None:
        self._lines = PhaseLines()
        self._at: dict[str, Any] = {}  # the unfinished phase, which a silence does not end

    def report(self, event: str, text: str, /, **fields: Any) -> None:
        self._write({**fields, "event": event, "message": text})

    def busy(self, activity: str) -> None:
        self._at = {}

    def still(self, activity: str, seconds: float) -> None:
        event = self._at or {"event": "busy", "message": activity}
        self._write({**event, "seconds": round(seconds, 1)})

    def progress(self, phase: str, done: int, total: int, loss: float | None) -> None:
        event = {"event": "progress", "phase": phase, "done": done, "total": total, "loss": loss}
        self._at = event if done < total else {}
        if self._lines.wants(phase, done, total):
            self._write(event)

    def _write(self, value: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps({"at": round(time.time(), 3), **value}, sort_keys=True) + "\n")
        sys.stdout.flush()


class TerminalDisplay(Display):
    """A display that shows progress bars on a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._phase, self._task = "", TaskID(0)
        self._shown = ("", 0)
        self._spinner: Status | None = None

    def report(self, event: str, text: str, /, **fields: Any) -> None:
        self._stop_spinner()
        self._console.print(plain(text, MAX_NEWS))

    def busy(self, activity: str) -> None:
        self._stop_spinner()

    def still(self, activity: str, seconds: float) -> None:
        if self._phase:
            return  # its bar is already displayed
        line = Text(f"{plain(activity, MAX_NEWS)} ({seconds:.0f} s)")
        if self._spinner is None:
            self._spinner = self._console.status(line)
            self._spinner.start()
        self._spinner.update(line)

    def progress(self, phase: str, done: int, total: int, loss: float | None) -> None:
        self._stop_spinner()
        if done >= total and self._shown == (phase, total):
            return  # its bar is already complete
        if phase != self._phase:
            self._end()
            self._phase = phase
            self._task = self._bars.add_task(_LABELS.get(phase, phase), total=total, note="", amount="")
            self._bars.start()
        self._bars.update(self._task, completed=done, total=total, amount=_amount(phase, done, total))
        if loss is not None:
            self._bars.update(self._task, note=f"loss {loss:.4f}")
        self._shown = (phase, total if done >= total else 0)
        if done >= total:
            self._end()

    def close(self) -> None:
        self._stop_spinner()
        self._end()

    def _stop_spinner(self) -> None:
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def _end(self) -> None:
        if self._phase:
            self._bars.stop()
            self._bars.remove_task(self._task)
            self._phase = ""


@contextmanager
def warnings_shown(display: Display) -> Iterator[None]:
    """Report warnings from training through ``display`` inside the block, instead of in Python's format."""
    before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        from gym_fed.training.run.reproducibility import RunWarning

        if issubclass(category, RunWarning):
            display.report("warning", f"warning: {message}")
        else:
            before(message, category, *place, **more)

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before


def make_display(console: Console, as_json: bool) -> Display:
    """Create the display for a console, or for JSON output."""
    if as_json:
        return EventReporter(JsonDisplay(), often=False)
    if console.is_terminal:
        return EventReporter(TerminalDisplay(console), often=True)
    return EventReporter(PlainDisplay(console), often=False)
