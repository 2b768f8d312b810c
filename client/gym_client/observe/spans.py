"""OpenTelemetry spans of the agent's tasks, created from its events: one per task, with a child span per phase."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from gym_client.display import Display
from gym_fed.core.tracing import RoundTrace, begin_span, traceparent_of

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_ENDS = ("receipt", "failed", "lost", "stopped")


class TracedDisplay(Display):
    """A display that forwards events and records the time between them as spans. Thread-safe.

    Args:
        inner: The display that events are forwarded to.
    """

    def __init__(self, inner: Display) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._task: Span | None = None
        self._trace = RoundTrace(0, 0)
        self._phase = ""
        self._span: Span | None = None

    def report(self, event: str, text: str, /, **fields: Any) -> None:
        if event == "task":
            self._begin_task(str(fields["server"]), str(fields["group"]))
        self._inner.report(event, text, **fields)
        if event in _ENDS:
            self._end_task(event, str(fields.get("verdict", "")))

    def progress(self, phase: str, done: int, total: int, loss: float | None) -> None:
        with self._lock:
            if self._task is not None and phase != self._phase:
                self._end_phase()
                self._phase = phase
                self._span = begin_span(phase, self._trace, traceparent_of(self._task))
            if done >= total:
                self._end_phase()
        self._inner.progress(phase, done, total, loss)

    def busy(self, activity: str) -> None:
        self._inner.busy(activity)

    def still(self, activity: str, seconds: float) -> None:
        self._inner.still(activity, seconds)

    def close(self) -> None:
        self._end_task("stopped", "")
        self._inner.close()

    def traceparent(self) -> str:
        """Return the trace ids of the current phase or task for the metadata of calls; empty between tasks."""
        with self._lock:
            return traceparent_of(self._span or self._task)

    def _begin_task(self, server: str, group: str) -> None:
        self._end_task("stopped", "")
        with self._lock:
            self._trace = RoundTrace.of(server, group)
            self._task = begin_span("task", self._trace)

    def _end_task(self, event: str, verdict: str) -> None:
        with self._lock:
            self._end_phase()
            if self._task is not None:
                self._task.set_attribute("gym.outcome", event)
                if verdict:
                    self._task.set_attribute("gym.verdict", verdict[:32])
                self._task.end()
            self._task = None

    def _end_phase(self) -> None:
        if self._span is not None:
            self._span.end()
        self._phase = ""
        self._span = None
