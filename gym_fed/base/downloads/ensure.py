"""Ensure that a model is on this machine, downloading it with consent; a complete model needs no request.

folder = ensure_model("Qwen/Qwen3-0.6B", consent=lambda offer: ask(offer.describe()))
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import typer

from gym_fed.base.downloads.fetch import Report, fetch, silent
from gym_fed.base.downloads.hub import cached_dataset
from gym_fed.base.downloads.offer import DownloadOffer, offer_dataset, offer_model
from gym_fed.base.downloads.selection import is_whole
from gym_fed.base.downloads.streamed import agree, agreed_commit
from gym_fed.base.models import MAX_ADAPTERS, is_hub_name, named_base, no_base_model, resolve
from gym_fed.core.console import err
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.progress import progress_bar

Consent = Callable[[DownloadOffer], bool]
"""Called with an offer; returns True to continue, and may raise a ``GymError``."""


def ensure_model(name: str, *, consent: Consent, report: Report = silent) -> Path:
    """Return the folder of a model; missing files are downloaded from the Hub if ``consent`` agrees.

    For an adapter, its base is ensured too, with a separate offer.

    Args:
        name: A model name or path, as in ``gym_fed.base.models.load_model``.
        consent: Called at most once per repository.
        report: Called with the progress; see ``fetch``.

    Raises:
        GymError: ``MODEL_NOT_FOUND`` without consent; errors from ``resolve`` for a path, of ``offer_model`` and of
            ``fetch``.
    """
    result: Path | None = None
    current = name
    for _ in range(MAX_ADAPTERS + 1):
        folder = _present(current)
        if folder is None:
            offer = offer_model(current)
            if not consent(offer):
                raise declined(offer)
            folder = fetch(offer, report)
        result = result or folder
        if (base := named_base(folder)) is None:
            return result
        current = base
    raise no_base_model(name)


def pull_model(name: str, *, consent: Consent, report: Report = silent) -> tuple[DownloadOffer, Path]:
    """Download the newest commit of a model from the Hub; needs consent if bytes are missing.

    Raises:
        GymError: ``USAGE`` for a name that is a local path; errors from ``ensure_model``.
    """
    if not is_hub_name(name):
        raise GymError(ErrorCode.USAGE, f"{name}: is a local path", "use a name on the Hub: OWNER/NAME")
    offer = offer_model(name)
    if offer.missing_bytes and not consent(offer):
        raise declined(offer)
    folder = fetch(offer, report)
    if (base := named_base(folder)) is not None:
        ensure_model(base, consent=consent, report=report)
    return offer, folder


def missing_model(name: str) -> bool:
    """Return True if ``ensure_model`` would send requests for ``name`` or its base."""
    current = name
    for _ in range(MAX_ADAPTERS + 1):
        if (folder := _present(current)) is None:
            return True
        if (base := named_base(folder)) is None:
            return False
        current = base
    raise no_base_model(name)


def missing_dataset(name: str) -> bool:
    """Return True if ``ensure_dataset`` would send requests for ``name``."""
    return cached_dataset(name) is None and agreed_commit(name) is None


def ensure_dataset(name: str, *, consent: Consent, subset: str | None = None) -> None:
    """Ask for consent to read a dataset from the Hub, unless it is cached or consent was given for this run.

    The rows are streamed at the commit of the offer.

    Raises:
        GymError: ``NOT_FOUND`` without consent; errors from ``offer_dataset``.
    """
    if not missing_dataset(name):
        return
    offer = offer_dataset(name, subset)
    if not consent(offer):
        raise declined(offer)
    agree(offer)


def declined(offer: DownloadOffer) -> GymError:
    """Return the error for a declined download."""
    code = ErrorCode.MODEL_NOT_FOUND if offer.kind == "model" else ErrorCode.NOT_FOUND
    return GymError(code, f"{offer.name}: not downloaded: declined", offer.remedy())


def _present(name: str) -> Path | None:
    """Return the folder of a complete model on this machine; None for a missing or incomplete Hub model."""
    try:
        folder = Path(resolve(name))
    except GymError as error:
        if error.code is not ErrorCode.MODEL_NOT_FOUND or not is_hub_name(name):
            raise
        return None
    return folder if not is_hub_name(name) or is_whole(folder) else None


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
