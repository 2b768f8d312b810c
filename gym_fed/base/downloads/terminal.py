"""Consent prompt and progress of downloads in the terminal, on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from gym_fed.base.downloads.ensure import Consent
from gym_fed.base.downloads.fetch import Report
from gym_fed.base.downloads.offer import DownloadOffer
from gym_fed.core.console import err
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import readable_bytes

LINE_SECONDS = 5.0
"""Interval of progress lines without a terminal."""


def consent(yes: bool) -> Consent:
    """Show each offer and ask for consent; with ``yes``, show it only.

    Raises:
        GymError: When called without ``yes`` and without a terminal: ``MODEL_NOT_FOUND`` or ``NOT_FOUND``, with bytes,
            licence and the command that agrees.
    """

    def ask(offer: DownloadOffer) -> bool:
        if yes:
            err.print(offer.describe())
            return True
        if not (sys.stdin.isatty() and err.is_terminal):
            code = ErrorCode.MODEL_NOT_FOUND if offer.kind == "model" else ErrorCode.NOT_FOUND
            raise GymError(code, f"not on this machine: {offer.describe()}", offer.remedy())
        err.print(offer.describe())
        with suppress(ImportError, OSError, ValueError):  # discard what was typed before the question
            import termios

            with suppress(termios.error):
                termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
        return typer.confirm("Read it?" if offer.streamed else "Download it?", err=True)

    return ask


@contextmanager
def progress() -> Iterator[Report]:
    """Show a progress bar on a terminal, a line every few seconds otherwise."""
    if not err.is_terminal:
        yield _lines()
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.progress import TransferSpeedColumn as Speed

    columns = (TextColumn("downloading"), BarColumn(bar_width=24), DownloadColumn(), Speed())
    with Progress(*columns, TimeRemainingColumn(), console=err, transient=True) as shown:
        task = shown.add_task("downloading", total=None, visible=False)

        def update(done: int, total: int, remark: str) -> None:
            shown.update(task, completed=done, total=total, visible=True)
            if remark:
                err.print(remark)

        yield update


def _lines() -> Report:
    last = time.monotonic()

    def line(done: int, total: int, remark: str) -> None:
        nonlocal last
        if remark:
            err.print(remark)
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            err.print(f"downloading: {readable_bytes(done)} of {readable_bytes(total)}")

    return line
