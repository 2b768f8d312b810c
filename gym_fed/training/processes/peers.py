"""Notify the machines of a run that a process on one of them has ended.

A collective fails immediately when a peer is gone. A process that waits for another to join, or to finish its own work,
would wait for ``distributed.timeout_seconds``, however. The launcher on each machine therefore records the end of a
process in the key-value store of torch's rendezvous, which all machines can read.
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
"""Environment variable with the host and port of the store, separated by a space."""

_KEY = "gym_fed/ended"
_POLL_SECONDS = 2.0
_OWN_REPORT_SECONDS = 10.0
_MAX_REASON_CHARS = 200

_stopped = threading.Event()


def announce(reason: str) -> None:
    """Announce to the other machines that a process of this machine has ended, and give them time to read it.

    Does nothing if the store is gone, since the run has then also ended on the machine of the store.
    """
    store = _store()
    if store is None:
        return
    try:
        store.set(_KEY, reason)
    except dist.DistError:
        return
    _stopped.wait(3 * _POLL_SECONDS)  # the store ends together with its machine's launcher


def watch() -> None:
    """Exit some seconds after another machine announces that one of its processes has ended.

    The main thread may be inside a torch call that no exception can interrupt. The delay lets a failing collective
    report its own error first, which is more informative.
    """
    if MEETING in os.environ:
        _stopped.clear()
        threading.Thread(target=_wait_for_announcement, name="peers", daemon=True).start()


def stop_watching() -> None:
    """Stop watching the other machines, so that this process can finish its own work."""
    _stopped.set()


def _store() -> TCPStore | None:
    host, _, port = os.environ[MEETING].partition(" ")
    try:
        timeout = timedelta(seconds=10)
        return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timeout)
    except dist.DistError:
        return None


def _wait_for_announcement() -> None:
    store = _store()
    while store is not None and not _stopped.wait(_POLL_SECONDS):
        try:
            if not store.check([_KEY]):
                continue
            reason = plain(store.get(_KEY).decode(errors="replace"), _MAX_REASON_CHARS)
        except dist.DistError:
            return  # the launcher that served the store has ended, so the remaining collectives fail
        if not _stopped.wait(_OWN_REPORT_SECONDS):
            code = ErrorCode.UNAVAILABLE
            sys.stderr.write(
                f"error ({code.value}): {reason}\n"
                "  see its output; to resume, run the same command again on every machine\n"
            )
            sys.stderr.flush()
            os._exit(code.exit_code)
        return
