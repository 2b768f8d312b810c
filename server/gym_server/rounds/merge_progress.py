"""Progress of a merge, stored in the database for display by other processes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import Connection, select

from gym_fed.core.tracing import begin_child
from gym_server.observe.instruments import MERGE_PHASE_SECONDS
from gym_server.store.database import Database
from gym_server.store.tables import settings
from gym_server.store.unavailable import StoreUnavailable

if TYPE_CHECKING:
    from opentelemetry.trace import Span

log = logging.getLogger("gym_server")

_SETTING = "merge_progress"
_WRITE_SECONDS = 0.5
"""Minimum time between two writes within a phase, in seconds; a new phase is written at once."""
_EVALUATIONS = ("checking the held-out loss", "evaluating")
"""Phases whose span is named ``evaluate``."""

MergeState = dict[str, str | int]
"""``phase``, ``done`` and ``total``; ``total`` is 0 if the steps of the phase are not counted."""


class MergeProgress:
    """Records the phase of a merge and its steps.

    Args:
        database: The hub's database.
        clock: Clock in seconds that measures the time between two writes.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database, self._clock = database, clock
        self._phase, self._done, self._total = "", 0, 0
        self._span: Span | None = None
        self._written_at = self._began_at = 0.0

    def begin(self, phase: str, total: int = 0, done: int = 0) -> None:
        """Begin a phase of ``total`` steps, ``done`` of which are finished."""
        self._end_phase()
        self._phase, self._done, self._total = phase, done, total
        self._began_at = self._clock()
        self._span = begin_child("evaluate" if phase in _EVALUATIONS else phase, phase=phase)
        self._write()

    def step(self, _: object = None) -> None:
        """Count one finished step of the phase."""
        self._done += 1
        if self._clock() - self._written_at >= _WRITE_SECONDS:
            self._write()

    def end(self) -> None:
        """Record that no merge is running; call it after success and failure."""
        self._end_phase()
        self._set("")

    def _end_phase(self) -> None:
        if self._phase:
            MERGE_PHASE_SECONDS.labels(self._phase).observe(self._clock() - self._began_at)
        if self._span is not None:
            self._span.end()
        self._phase, self._span = "", None

    def _write(self) -> None:
        self._written_at = self._clock()
        state: MergeState = {"phase": self._phase, "done": self._done, "total": self._total}
        self._set(json.dumps(state))

    def _set(self, text: str) -> None:
        """Write the state, ignoring an unreachable or full database, which the merge itself reports."""
        try:
            self._database.set(_SETTING, text)
        except StoreUnavailable as error:
            log.debug("the progress of the merge is not shown: %s", error)


def merge_state(tx: Connection) -> MergeState | None:
    """Return the progress of the running merge, or None. A killed hub's last state remains until it resumes."""
    text = tx.scalar(select(settings.c.value).where(settings.c.key == _SETTING))
    return json.loads(text) if text else None


def merge_text(state: MergeState) -> str:
    """Return the progress as text, such as "checking updates, 2 of 5"."""
    if not state["total"]:
        return str(state["phase"])
    return f"{state['phase']}, {state['done']} of {state['total']}"


def num_tensors(updates: Iterable[Path]) -> int:
    """Return the number of distinct tensors in unmasked updates."""
    from gym_fed.delta.file import DeltaFile

    names: set[str] = set()
    for path in updates:
        with DeltaFile.open(path) as delta:
            names.update(delta.names)
    return len(names)
