"""Progress and warnings of training on standard error, and a graceful stop on Ctrl-C or SIGTERM."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from gym_fed.core.console import err
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.progress import progress_bar

if TYPE_CHECKING:
    from gym_fed.data.row_counts import RowCounts
    from gym_fed.training.run.hooks import StepReport


_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@contextmanager
def stop_on_ctrl_c(keeping: str = " with a checkpoint") -> Iterator[Callable[[], bool]]:
    """End the work in the block after the current step at the first Ctrl-C or SIGTERM, and immediately at the second.

    Args:
        keeping: What is saved at the first signal, for the message.

    Yields:
        A function that returns True after the first signal; the work calls it after each step.

    Raises:
        GymError: ``TERMINATED`` instead of ``INTERRUPTED`` if the last signal was SIGTERM, so that supervisors get the
            exit status 128 + 15.
    """
    received: list[int] = []
    has_begun = False

    def handler(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1 or not has_begun:
            raise KeyboardInterrupt
        # Not through the console, since the signal may have arrived while it was writing.
        text = f"\nstopping after this step{keeping}; {_NAMES[signal.Signals(number)]} again stops at once\n"
        with suppress(OSError, ValueError):  # its reader may have been ended by the same Ctrl-C
            os.write(sys.stderr.fileno(), text.encode())

    def should_stop() -> bool:
        nonlocal has_begun
        has_begun = True
        return bool(received)

    before = {number: signal.signal(number, handler) for number in _NAMES}
    try:
        yield should_stop
    except KeyboardInterrupt as error:
        if received[-1:] == [signal.SIGTERM]:
            raise GymError(ErrorCode.TERMINATED, "stopped at once by SIGTERM") from error
        raise
    except GymError as error:
        if error.code is ErrorCode.INTERRUPTED and received[-1:] == [signal.SIGTERM]:
            raise GymError(ErrorCode.TERMINATED, error.message, error.hint) from error
        raise
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


_GIB = 1 << 30


@contextmanager
def progress(interval: Callable[[int], int]) -> Iterator[Callable[[StepReport], None]]:
    """Yield the ``on_report`` of a ``Trainer``: a bar on a terminal, else a line per logging interval.

    ``interval`` returns the steps between lines for the number of steps of the run.

    Of several processes only the first shows progress.
    """
    if int(os.environ.get("RANK", "0")) != 0:
        yield lambda report: None
        return
    if not err.is_terminal:

        def line(report: StepReport) -> None:
            if report.evaluation is not None:
                err.print(f"  after step {report.step}  {_evaluation(report)}")
            elif report.step in (1, report.total) or report.step % interval(report.total) == 0:
                err.print(f"step {report.step}/{report.total}  {_figures(report)}")

        yield line
        return

    with progress_bar("training", keep=True) as update:

        def show(report: StepReport) -> None:
            if report.evaluation is not None:
                err.print(f"after step {report.step}  {_evaluation(report)}")
                return
            update(report.step, report.total, note=_figures(report))

        yield show


def report_rows(max_length: int) -> Callable[[str, RowCounts], None]:
    """Return the ``on_rows`` of a ``Trainer``, which prints counts and a warning if much is lost."""
    from gym_fed.data.rows import unread_in_words
    from gym_fed.data.string_rows import forms_in_words

    def report(name: str, counts: RowCounts) -> None:
        err.print(f"{name}: {counts.describe(max_length, 'measured' if name == 'eval_data' else 'learned')}")
        for sentence in forms_in_words(counts.forms):
            err.print(f"{name}: {sentence}")
        if (unread := unread_in_words(counts.unread)) is not None:
            err.print(f"{name}: {unread}")
        if (problem := counts.warning(max_length)) is not None:
            err.print(f"warning: {name}: {problem}", style="yellow")

    return report


@contextmanager
def readable_warnings() -> Iterator[None]:
    """Print the warnings of a run as single lines instead of in Python's format."""
    from gym_fed.training.run.reproducibility import RunWarning

    previous = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: object, **more: object) -> None:
        if issubclass(category, RunWarning):
            err.print(f"warning: {message}")
        else:
            previous(message, category, *rest, **more)  # type: ignore[arg-type]  # what Python gave

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = previous


def _figures(report: StepReport) -> str:
    parts = [f"loss {report.loss:.4f}"]
    if report.reward is not None:
        parts.append(f"reward {report.reward:.3f}")
    if report.epsilon is not None:
        parts.append(f"epsilon {report.epsilon:.2f}")
    if report.tokens_per_second is not None:
        parts.append(f"{report.tokens_per_second:.0f} tokens/s")
    if report.seconds_left is not None and report.step < report.total:
        parts.append(f"{duration(report.seconds_left)} left")
    parts.append(f"{report.memory_bytes / _GIB:.1f} GiB")
    return "  ".join(parts)


def _evaluation(report: StepReport) -> str:
    figures = {
        key.removeprefix("eval_"): value
        for key, value in (report.evaluation or {}).items()
        if key.startswith("eval_")
    }
    return "eval " + "  ".join(f"{name} {value:.4f}" for name, value in figures.items())


def duration(seconds: float) -> str:
    """Format seconds as ``1:02:03``, or ``2:03`` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
