"""Consent prompt and progress of downloads in the terminal, on standard error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import typer

from gym_fed.base.downloads.ensure import Consent
from gym_fed.base.downloads.fetch import Report
from gym_fed.base.downloads.offer import DownloadOffer
from gym_fed.core.console import err
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.progress import progress_bar


def consent(yes: bool) -> Consent:
    """Return a function that shows each offer and prompts for consent; with ``yes`` it only shows the offer.

    Raises:
        GymError: Without ``yes`` and without a terminal: ``MODEL_NOT_FOUND`` or ``NOT_FOUND``, with bytes, licence
            and the command that gives consent.
    """

    def ask(offer: DownloadOffer) -> bool:
        if yes:
            err.print(offer.describe())
            return True
        if not (sys.stdin.isatty() and err.is_terminal):
            code = ErrorCode.MODEL_NOT_FOUND if offer.kind == "model" else ErrorCode.NOT_FOUND
            raise GymError(code, f"not on this machine: {offer.describe()}", offer.remedy())
        err.print(offer.describe())
        with suppress(ImportError, OSError, ValueError):  # discard input typed before the question
            import termios

            with suppress(termios.error):
                termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
        return typer.confirm("Read it?" if offer.streamed else "Download it?", err=True)

    return ask


@contextmanager
def progress() -> Iterator[Report]:
    """Show a progress bar on a terminal, a line every few seconds otherwise."""
    with progress_bar("downloading", unit="bytes") as update:

        def report(done: int, total: int, remark: str) -> None:
            if remark:
                err.print(remark)
            update(done, total)

        yield report
