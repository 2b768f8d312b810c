"""Prometheus metrics: requests by route and status, and statistics of the engine and the store.

Users cannot choose the values of labels: there are few routes and statuses, and no labels for variants, keys or models.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, generate_latest
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from gym_fed.core.metrics import MetricRow, MetricTable, Value
from gym_fed.serving.http.gateway import Gateway
from gym_fed.version import __version__

ROUTES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/health",
    "/ready",
    "/metrics",
)
_BY_ID = ("/v1/models", "/v1/responses", "/v1/chat/completions")
"""Routes with names or ids below them."""

_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

_ROWS = (
    MetricRow("gym_api_info", "Always 1; the label is the version", ("version",)),
    MetricRow("gym_api_ready", "1 once the model is loaded, until the server drains"),
    MetricRow("gym_api_requests", "Requests by route and HTTP status", ("route", "status"), "counter"),
    MetricRow(
        "gym_api_request_seconds",
        "Seconds from a request to the last byte of its answer",
        ("route",),
        "histogram",
    ),
    MetricRow("gym_api_active_requests", "Requests whose answer is in progress"),
    MetricRow(
        "gym_api_malformed_tool_calls",
        "Texts in answers that looked like tool calls but were malformed",
        (),
        "counter",
    ),
    MetricRow(
        "gym_api_usage_lost",
        "Lines that could not be written to the usage log; the process's log has them",
        (),
        "counter",
    ),
    MetricRow(
        "gym_filter_refused",
        "Requests and answers that the content filter refused",
        ("direction", "category"),
        "counter",
    ),
    MetricRow("gym_engine_healthy", "1 while the engine's loop is running and its steps succeed"),
)
_ENGINE = (
    MetricRow("gym_engine_refused", "Requests refused because too many waited", (), "counter"),
    MetricRow("gym_engine_prompt_tokens", "Prompt tokens prefilled", (), "counter"),
    MetricRow("gym_engine_generated_tokens", "Generated tokens", (), "counter"),
    MetricRow("gym_engine_embeddings", "Finished embeddings", (), "counter"),
    MetricRow("gym_engine_steps", "Forward passes of the model", (), "counter"),
    MetricRow("gym_engine_failed_steps", "Forward passes that raised", (), "counter"),
    MetricRow("gym_engine_rows", "Chunks in all steps, one per request in a step", (), "counter"),
    MetricRow("gym_engine_rows_with_variants", "Chunks of requests for a variant", (), "counter"),
    MetricRow(
        "gym_engine_preemptions",
        "Preemptions of running requests, which are computed again later",
        (),
        "counter",
    ),
    MetricRow("gym_engine_cached_tokens", "Prompt tokens found in the prefix cache", (), "counter"),
    MetricRow("gym_engine_proposed_tokens", "Tokens that speculative decoding proposed", (), "counter"),
    MetricRow("gym_engine_accepted_tokens", "Proposed tokens that were sampled", (), "counter"),
    MetricRow("gym_engine_busy_seconds", "Seconds in steps, including admission", (), "counter"),
    MetricRow("gym_engine_model_seconds", "Seconds in forward passes", (), "counter"),
    MetricRow("gym_engine_running", "Running requests"),
    MetricRow("gym_engine_queued", "Waiting requests"),
    MetricRow("gym_engine_kv_bytes_used", "Bytes of the KV blocks that running requests hold"),
    MetricRow("gym_engine_kv_bytes_limit", "Maximum size in bytes of KV caches"),
)
_ENGINE_BY = (
    MetricRow("gym_engine_finished", "Finished requests by reason", ("reason",), "counter"),
    MetricRow(
        "gym_engine_forwards",
        "Forward passes: our own decoder, transformers in packed steps, or the general path",
        ("forward",),
        "counter",
    ),
    MetricRow(
        "gym_engine_sign_products", "Products of layers' sign deltas, by kernel", ("kernel",), "counter"
    ),
    MetricRow(
        "gym_engine_packed_products",
        "Products of layers' packed deltas other than signs, by form",
        ("form",),
        "counter",
    ),
)
_ENGINE_TIMES = (
    MetricRow(
        "gym_engine_first_token_seconds", "Seconds from submission to the first token", (), "histogram"
    ),
    MetricRow(
        "gym_engine_per_token_seconds", "Seconds from one token of an answer to the next", (), "histogram"
    ),
)
_STORE = (
    MetricRow("gym_variants_hits", "Uses of a variant that was in memory", (), "counter"),
    MetricRow("gym_variants_misses", "Uses of a variant that had to be loaded", (), "counter"),
    MetricRow("gym_variants_loads", "Variants loaded", (), "counter"),
    MetricRow("gym_variants_evictions", "Evicted variants", (), "counter"),
    MetricRow("gym_variants_errors", "Loads that failed", (), "counter"),
    MetricRow("gym_variants_load_seconds", "Seconds spent loading variants", (), "counter"),
    MetricRow("gym_variants_cache_bytes", "Maximum size in bytes of variants in memory"),
    MetricRow("gym_variants_resident", "Variants in memory"),
    MetricRow("gym_variants_resident_bytes", "Bytes of variants in memory"),
    MetricRow("gym_variants_pinned", "Variants in use"),
    MetricRow("gym_variants_loading", "Variants that are loading"),
)
ROWS = (*_ROWS, *_ENGINE, *_ENGINE_BY, *_ENGINE_TIMES, *_STORE)
"""All metric families of an API server."""
_BY_NAME = {row.name: row for row in ROWS}


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self, gateway: Gateway) -> None:
        self._registry = CollectorRegistry()
        requests, seconds = _BY_NAME["gym_api_requests"], _BY_NAME["gym_api_request_seconds"]
        self._requests = Counter(
            requests.name, requests.description, requests.labels, registry=self._registry
        )
        self._seconds = PrometheusHistogram(
            seconds.name, seconds.description, seconds.labels, buckets=_SECONDS, registry=self._registry
        )
        self._registry.register(_Served(gateway))
        ProcessCollector(registry=self._registry)

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Count a request that has ended; its status is 499 if the client disconnected."""
        route = path if path in ROUTES else _route_of_id(path)
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


def _route_of_id(path: str) -> str:
    return next((f"{route}/{{id}}" for route in _BY_ID if path.startswith(f"{route}/")), "other")


class _Served(Collector):
    """A collector that reads the engine and the store when it is scraped."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        serving = self._gateway.serving
        values: dict[str, Value | None] = {
            "gym_api_info": {__version__: 1},
            "gym_api_ready": float(serving is not None and not self._gateway.draining),
            "gym_api_active_requests": self._gateway.active,
        }
        if serving is None:
            yield from MetricTable(ROWS, values).collect()
            return
        engine = serving.engine.stats()
        values["gym_engine_healthy"] = float(engine.healthy)
        values |= _read("gym_engine", engine, _ENGINE + _ENGINE_BY)
        values["gym_api_malformed_tool_calls"] = serving.service.malformed_tool_calls
        if serving.usage_log is not None:
            values["gym_api_usage_lost"] = serving.usage_log.lost
        if serving.content_filter is not None:
            values["gym_filter_refused"] = serving.content_filter.refused()
        if serving.store is not None:
            values |= _read("gym_variants", serving.store.stats(), _STORE)
        yield from MetricTable(ROWS, values).collect()
        for row in _ENGINE_TIMES:
            name = row.name.removeprefix("gym_engine_").removesuffix("_seconds")
            yield _histogram(row, getattr(engine, name))


def _read(prefix: str, stats: Any, rows: Iterable[MetricRow]) -> dict[str, Value | None]:
    """Return the value of each row, from the attribute with the row's name without its prefix."""
    return {row.name: getattr(stats, row.name.removeprefix(f"{prefix}_")) for row in rows}


def _histogram(row: MetricRow, histogram: Any) -> Metric:
    """Convert counts per bucket to Prometheus's cumulative ones."""
    buckets, total = [], 0
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(row.name, row.description, buckets=buckets, sum_value=histogram.sum)
