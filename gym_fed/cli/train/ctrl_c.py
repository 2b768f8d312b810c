"""Ctrl-C and SIGTERM for long work: the first ends it after the current step, the second at once.

Before the first step there is nothing to keep, and so the first ends it at once, too."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from gym_fed.core.errors import ErrorCode, GymError

_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


@contextmanager
def stop_on_ctrl_c(keeping: str = " with a checkpoint") -> Iterator[Callable[[], bool]]:
    """End the work in the block after the current step at the first Ctrl-C or SIGTERM, and at once at the second.

    Args:
        keeping: What the first one keeps, for the message.

    Yields:
        A function that is true after the first signal; the work calls it after each step.

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
        # Not through the console: the signal may have come while it was writing.
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
