"""Counters and histograms of this process, recorded where the work is done and exported at a running hub's
``/metrics``.

They are module constants, as usual with the Prometheus client, since a process runs one hub.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

from gym_fed.core.metrics import MetricRow

REGISTRY = CollectorRegistry()

_SHORT = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_LONG = (0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0)

ROWS = (
    MetricRow(
        "gym_hub_database_seconds",
        "Seconds of database transactions, with the wait for the write lock and the work inside",
        ("kind",),
        "histogram",
    ),
    MetricRow("gym_hub_call_seconds", "Seconds of calls, without work streams", ("method",), "histogram"),
    MetricRow("gym_hub_merge_phase_seconds", "Seconds of the phases of merges", ("phase",), "histogram"),
    MetricRow("gym_hub_upload_bytes", "Bytes of objects received since the start", (), "counter"),
    MetricRow(
        "gym_hub_gc_passes", "Passes of the garbage collection since the start", ("outcome",), "counter"
    ),
    MetricRow(
        "gym_hub_gc_freed_bytes", "Bytes that garbage collection deleted since the start", (), "counter"
    ),
)
_BY_NAME = {row.name: row for row in ROWS}


def _histogram(name: str, buckets: tuple[float, ...]) -> Histogram:
    row = _BY_NAME[name]
    return Histogram(row.name, row.description, row.labels, buckets=buckets, registry=REGISTRY)


def _counter(name: str) -> Counter:
    row = _BY_NAME[name]
    return Counter(row.name, row.description, row.labels, registry=REGISTRY)


DATABASE_SECONDS = _histogram("gym_hub_database_seconds", _SHORT)
CALL_SECONDS = _histogram("gym_hub_call_seconds", _SHORT)
MERGE_PHASE_SECONDS = _histogram("gym_hub_merge_phase_seconds", _LONG)
UPLOAD_BYTES = _counter("gym_hub_upload_bytes")
GC_PASSES = _counter("gym_hub_gc_passes")
"""Garbage collection passes by outcome: ``done``, ``skipped`` (while a backup runs) or ``failed``."""
GC_FREED_BYTES = _counter("gym_hub_gc_freed_bytes")
ProcessCollector(registry=REGISTRY)

for _kind in ("read", "write"):
    DATABASE_SECONDS.labels(_kind)
for _outcome in ("done", "skipped", "failed"):
    GC_PASSES.labels(_outcome)


@contextmanager
def timed(histogram: Histogram, label: str) -> Iterator[None]:
    """Record the duration of a block, even if it raises."""
    start = time.perf_counter()
    try:
        yield
    finally:
        histogram.labels(label).observe(time.perf_counter() - start)
