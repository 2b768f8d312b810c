"""News of a process that has ended on another machine.

A collective fails at once when its peer is gone, but a process that waits for another to join, or to finish its own
work, would wait for ``distributed.timeout_seconds``. The launcher of the machine therefore leaves word where the
machines met, in the key-value store of torch's rendezvous.
"""

from __future__ import annotations

import os
import sys
import threading
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from gym_fed.core.errors import ErrorCode
from gym_fed.core.text import plain

MEETING = "GYM_TRAIN_MEETING"
"""Environment variable of a process: host and port, separated by a space."""

_KEY = "gym_fed/ended"
_SECONDS_BETWEEN = 2.0
_SECONDS_FOR_OWN_REPORT = 10.0
_LONGEST_REASON = 200

_stopped = threading.Event()


def announce(reason: str) -> None:
    """Tell the other machines that a process of this one has ended, and leave them time to read it.

    Does nothing if the meeting point is gone: the run has then ended there too.
    """
    store = _store()
    if store is None:
        return
    try:
        store.set(_KEY, reason)
    except dist.DistError:
        return
    _stopped.wait(3 * _SECONDS_BETWEEN)  # the store ends with the launcher of its machine


def watch() -> None:
    """End this process some seconds after another machine announces the end of one of its own.

    Its main thread may be inside a call of torch that no exception reaches. A collective that fails gives a better
    report, and has time for it.
    """
    if MEETING in os.environ:
        _stopped.clear()
        threading.Thread(target=_wait_for_news, name="peers", daemon=True).start()


def stop_watching() -> None:
    """Let this process finish its own work, whatever becomes of the others."""
    _stopped.set()


def _store() -> TCPStore | None:
    host, _, port = os.environ[MEETING].partition(" ")
    try:
        return TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
        )
    except dist.DistError:
        return None


def _wait_for_news() -> None:
    store = _store()
    while store is not None and not _stopped.wait(_SECONDS_BETWEEN):
        try:
            if not store.check([_KEY]):
                continue
            reason = plain(store.get(_KEY).decode(errors="replace"), _LONGEST_REASON)
        except dist.DistError:
            return  # the launcher of that machine has ended: collectives fail, if any is left
        if not _stopped.wait(_SECONDS_FOR_OWN_REPORT):
            code = ErrorCode.UNAVAILABLE
            sys.stderr.write(
                f"error ({code.value}): {reason}\n"
                "  see its output; to resume, run the same command again on every machine\n"
            )
            sys.stderr.flush()
            os._exit(code.exit_code)
        return
