"""What a contributor sees: bars on a terminal, plain lines elsewhere, a JSON object a line with ``--json``."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from gym_fed.text import plain

MAX_NEWS = 1000
"""Characters of one line of news; much of it is what the hub says."""

_LINES_PER_PHASE = 10
_LABELS = {
    "fetch": "fetching",
    "train": "training",
    "distill": "distilling",
    "encode": "encoding",
    "upload": "uploading",
    "ledger": "ledger",
}


class Display:
    """The base class, and the one that shows nothing."""

    def tell(self, event: str, text: str, **fields: Any) -> None:
        """News: an event's name and fields for programs, a text for people."""

    def progress(self, phase: str, done: int, total: int, loss: float | None) -> None:
        """How far a phase is; ``done == total`` ends it."""

    def close(self) -> None:
        """Leave the terminal as it was."""


class PlainDisplay(Display):
    """Lines on standard error, about ten a phase."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._told = ("", -1)

    def tell(self, event: str, text: str, **fields: Any) -> None:
        self._console.print(plain(text, MAX_NEWS), markup=False)

    def progress(self, phase: str, done: int, total: int, loss: float | None) -> None:
        step = (phase, _LINES_PER_PHASE * done // total if total else 0)
        if step == self._told:
            return
        self._told = step
        what = "" if loss is None else f", loss {loss:.4f}"
        self._console.print(f"{_LABELS.get(phase, phase)} {done}/{total}{what}", markup=False)


class JsonDisplay(Display):
    """One JSON object a line on standard output."""

    def __init__(self) -> None:
        self._told = ("", -1)

    def tell(self, event: str, text: str, **fields: Any) -> None:
        self._write({"event": event, "message": text, **fields})

    def progress(self, phase: str, done: int, total: int, loss: float | None) -> None:
        step = (phase, _LINES_PER_PHASE * done // total if total else 0)
        if step != self._told:
            self._told = step
            self._write({"event": "progress", "phase": phase, "done": done, "total": total, "loss": loss})

    def _write(self, value: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps({"at": round(time.time(), 3), **value}, sort_keys=True) + "\n")
        sys.stdout.flush()


class TerminalDisplay(Display):
    """Bars that move."""

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

    def tell(self, event: str, text: str, **fields: Any) -> None:
        self._console.print(plain(text, MAX_NEWS), markup=False)

    def progress(self, phase: str, done: int, total: int, loss: float | None) -> None:
        if done >= total and self._shown == (phase, total):
            return  # its bar is full already
        if phase != self._phase:
            self._end()
            self._phase = phase
            self._task = self._bars.add_task(_LABELS.get(phase, phase), total=total, note="", amount="")
            self._bars.start()
        in_bytes = phase in ("fetch", "upload")
        amount = f"{readable_bytes(done)} of {readable_bytes(total)}" if in_bytes else f"{done}/{total}"
        self._bars.update(self._task, completed=done, total=total, amount=amount)
        if loss is not None:
            self._bars.update(self._task, note=f"loss {loss:.4f}")
        self._shown = (phase, total if done >= total else 0)
        if done >= total:
            self._end()

    def close(self) -> None:
        self._end()

    def _end(self) -> None:
        if self._phase:
            self._bars.stop()
            self._bars.remove_task(self._task)
            self._phase = ""


def make_display(console: Console, as_json: bool) -> Display:
    """The display for where the output goes."""
    if as_json:
        return JsonDisplay()
    return TerminalDisplay(console) if console.is_terminal else PlainDisplay(console)


def readable_bytes(num_bytes: float) -> str:
    """``1.5 MB``; powers of ten, as networks count."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.2f} GB"
