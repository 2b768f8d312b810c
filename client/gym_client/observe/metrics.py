"""The agent's metrics, counted from its events; written to a textfile for node_exporter or served on a local port."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from gym_client.display import Display
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.metrics import CONTENT_TYPE, MetricRow, Value, exposition
from gym_fed.version import __version__

ROWS = (
    MetricRow("gym_client_info", "Always 1; the label has the version", ("version",)),
    MetricRow(
        "gym_client_last_event_timestamp_seconds", "When the agent last reported anything, Unix seconds"
    ),
    MetricRow("gym_client_hub_reachable", "1 while the hub can be reached"),
    MetricRow("gym_client_paused", "1 while the agent is paused by its hours, battery limit or owner"),
    MetricRow("gym_client_disk_full", "1 while the agent waits for disk space"),
    MetricRow("gym_client_tasks", "Tasks since the start by event", ("event",), "counter"),
    MetricRow("gym_client_verdicts", "Verdicts on updates since the start", ("verdict",), "counter"),
    MetricRow(
        "gym_client_bytes", "Bytes of objects moved for tasks since the start", ("direction",), "counter"
    ),
    MetricRow(
        "gym_client_phase_seconds", "Seconds in phases of tasks since the start", ("phase",), "counter"
    ),
    MetricRow("gym_client_phase_progress", "Finished share of the current phase", ("phase",)),
    MetricRow("gym_client_train_loss", "Loss of the last training step, nats"),
    MetricRow("gym_client_balance_credits", "Balance on the hub"),
)
"""All metric families of the agent."""

PHASES = ("fetch", "base", "train", "distill", "encode", "upload", "ledger")
VERDICTS = ("admitted", "refused", "merged", "duplicate", "rejected", "aborted", "received", "failed")
_TASK_EVENTS = {
    "task": "received",
    "receipt": "answered",
    "failed": "failed",
    "lost": "lost",
    "stopped": "stopped",
}
_STATES = {
    "away": ("gym_client_hub_reachable", 0.0),
    "back": ("gym_client_hub_reachable", 1.0),
    "paused": ("gym_client_paused", 1.0),
    "resumed": ("gym_client_paused", 0.0),
    "disk-full": ("gym_client_disk_full", 1.0),
    "room": ("gym_client_disk_full", 0.0),
}
_WRITE_SECONDS = 5.0
"""Minimum seconds between two writes of the textfile."""


class MeteredDisplay(Display):
    """A display that counts events and forwards them. Thread-safe.

    Text from the hub never becomes a label; unknown verdicts and phases are counted as ``other``.

    Args:
        inner: The display that events are forwarded to.
        textfile: File to write; None to write none.
        clock: Returns Unix time in seconds.
    """

    def __init__(
        self, inner: Display, textfile: Path | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self._inner, self._textfile, self._clock = inner, textfile, clock
        self._lock = threading.Lock()
        self._counts: defaultdict[tuple[str, str], float] = defaultdict(float)
        for name, labels in (
            ("gym_client_tasks", _TASK_EVENTS.values()),
            ("gym_client_verdicts", VERDICTS),
            ("gym_client_bytes", ("down", "up")),
            ("gym_client_phase_seconds", PHASES),
        ):
            self._counts.update({(name, label): 0.0 for label in labels})
        self._values: dict[str, Value] = {
            "gym_client_info": {__version__: 1},
            "gym_client_hub_reachable": 1.0,
            "gym_client_paused": 0.0,
            "gym_client_disk_full": 0.0,
        }
        self._phase, self._since = "", 0.0
        self._written = float("-inf")
        self._is_failing = False
        self._note()

    def report(self, event: str, text: str, /, **fields: Any) -> None:
        self._inner.report(event, text, **fields)
        with self._lock:
            if event in _TASK_EVENTS:
                self._end_phase()
                self._counts["gym_client_tasks", _TASK_EVENTS[event]] += 1
            if event in _STATES:
                name, value = _STATES[event]
                self._values[name] = value
            if event in ("receipt", "verdict"):
                self._counts["gym_client_verdicts", _listed(fields.get("verdict"), VERDICTS)] += 1
            if event == "traffic":
                self._counts["gym_client_bytes", "down"] += fields["bytes_down"]
                self._counts["gym_client_bytes", "up"] += fields["bytes_up"]
            if event == "balance":
                self._values["gym_client_balance_credits"] = fields["balance"]
            self._note()
        self._write(self._clock())

    def progress(self, phase: str, done: int, total: int, loss: float | None) -> None:
        self._inner.progress(phase, done, total, loss)
        phase = _listed(phase, PHASES)
        with self._lock:
            if phase != self._phase:
                self._end_phase()
                self._phase, self._since = phase, self._clock()
            self._values["gym_client_phase_progress"] = {phase: done / total if total else 0.0}
            if loss is not None:
                self._values["gym_client_train_loss"] = loss
            if done >= total:
                self._end_phase()
            self._note()
        self._write(self._clock() - _WRITE_SECONDS)

    def busy(self, activity: str) -> None:
        self._inner.busy(activity)

    def still(self, activity: str, seconds: float) -> None:
        self._inner.still(activity, seconds)

    def close(self) -> None:
        self._inner.close()
        self._write(self._clock())

    def exposition(self) -> bytes:
        """Return the metrics in the Prometheus text format."""
        with self._lock:
            counted: dict[str, dict[str, float]] = {}
            for (name, label), number in self._counts.items():
                counted.setdefault(name, {})[label] = number
            return exposition(ROWS, {**self._values, **counted})

    def _note(self) -> None:
        self._values["gym_client_last_event_timestamp_seconds"] = self._clock()

    def _end_phase(self) -> None:
        if self._phase:
            self._counts["gym_client_phase_seconds", self._phase] += self._clock() - self._since
        self._phase = ""

    def _write(self, since: float) -> None:
        """Write the textfile unless it was written after ``since``. A full disk must not stop the agent."""
        if self._textfile is None or self._written > since:
            return
        self._written = self._clock()
        try:
            write_atomically(self._textfile, self.exposition(), mode=0o644)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                self._inner.report(
                    "warning", f"warning: {self._textfile} is not written: {error.strerror or error}"
                )
            self._is_failing = True


def _listed(word: object, known: tuple[str, ...]) -> str:
    return word if isinstance(word, str) and word in known else "other"


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


class _Threaded(ThreadingMixIn, WSGIServer):
    daemon_threads = True


@contextmanager
def served(metrics: Callable[[], bytes], port: int) -> Iterator[None]:
    """Serve ``/metrics`` on 127.0.0.1 inside the block.

    Web pages in this machine's browser cannot read the metrics, since requests for other host names are refused.

    Raises:
        GymError: ``ADDRESS_IN_USE`` if the port is taken.
    """
    hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}

    def answer(environ: dict[str, Any], start: Callable[..., object]) -> Iterable[bytes]:
        if environ.get("HTTP_HOST") not in hosts or environ.get("PATH_INFO") != "/metrics":
            start("404 Not Found", [("Content-Type", "text/plain")])
            return [b""]
        start("200 OK", [("Content-Type", CONTENT_TYPE)])
        return [metrics()]

    try:
        server = make_server("127.0.0.1", port, answer, _Threaded, _Quiet)
    except OSError as error:
        raise GymError(
            ErrorCode.ADDRESS_IN_USE,
            f"observe.port: 127.0.0.1:{port}: {error.strerror or error}",
            "choose another port in policy.yaml",
        ) from error
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
