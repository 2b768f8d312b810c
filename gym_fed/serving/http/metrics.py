"""Prometheus metrics: requests by route and status, and figures of the engine and the store.

No label has values that users choose: routes and statuses are few, and there is none for a variant, key or model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client import Histogram as PrometheusHistogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from gym_fed.serving.http.gateway import Gateway

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

_ENGINE_COUNTS = {
    "refused": "Requests refused because too many waited.",
    "prompt_tokens": "Tokens of prefill.",
    "generated_tokens": "Tokens of decode.",
    "embeddings": "Embeddings made.",
    "steps": "Forwards of the model.",
    "failed_steps": "Forwards that raised.",
    "rows": "Chunks of all steps, one for each request in a step.",
    "rows_with_variants": "Those of requests for a variant.",
    "preemptions": "Times a running request gave its KV blocks to others, to be computed again.",
    "cached_tokens": "Tokens of prompts that were in the prefix cache.",
    "proposed_tokens": "Tokens that speculative decoding proposed.",
    "accepted_tokens": "Those of them that were sampled.",
    "busy_seconds": "Seconds in steps, admission included.",
    "model_seconds": "Seconds in forwards.",
}
_ENGINE_COUNTS_BY = {
    "finished": ("reason", "Requests by how they ended."),
    "forwards": ("forward", "Forwards: our own decoder, transformers in packed steps, or the general path."),
    "sign_products": ("kernel", "Products of layers' sign deltas, by kernel."),
    "packed_products": ("form", "Products of layers' packed deltas other than signs, by form."),
}
_ENGINE_STATES = {
    "running": "Running requests.",
    "queued": "Waiting requests.",
    "kv_bytes_used": "Bytes of the KV blocks that running requests hold.",
    "kv_bytes_limit": "Most bytes of KV caches.",
}
_ENGINE_TIMES = {
    "first_token": "Seconds from submission to the first token.",
    "per_token": "Seconds from one token of an answer to its next.",
}
_STORE_COUNTS = {
    "hits": "Uses of a variant that was in memory.",
    "misses": "Uses of a variant that had to be loaded.",
    "loads": "Variants loaded.",
    "evictions": "Variants that made room for others.",
    "errors": "Loads that failed.",
    "load_seconds": "Seconds of all loads together.",
}
_STORE_STATES = {
    "cache_bytes": "Most bytes of variants in memory.",
    "resident": "Variants in memory.",
    "resident_bytes": "What they take.",
    "pinned": "Those of them in use.",
    "loading": "Variants that are loading.",
}


class Metrics:
    """The metrics of one server, in their own registry."""

    def __init__(self, gateway: Gateway) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "gym_api_requests",
            "Requests by route and HTTP status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._seconds = PrometheusHistogram(
            "gym_api_request_seconds",
            "Seconds from a request to the last byte of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        active = Gauge("gym_api_active_requests", "Active requests for answers.", registry=self._registry)
        active.set_function(lambda: gateway.active)
        self._registry.register(_Served(gateway))

    def observe(self, path: str, status: int, seconds: float) -> None:
        """Count a request that has ended; 499 if its client disconnected."""
        route = path if path in ROUTES else _route_of_id(path)
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def text(self) -> tuple[bytes, str]:
        """Return the exposition and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST


def _route_of_id(path: str) -> str:
    return next((f"{route}/{{id}}" for route in _BY_ID if path.startswith(f"{route}/")), "other")


class _Served(Collector):
    """Collector that reads engine and store when it is scraped."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        serving = self._gateway.serving
        if serving is None:
            return
        engine = serving.engine.stats()
        yield GaugeMetricFamily(
            "gym_engine_healthy", "Whether the engine's loop is alive.", value=float(engine.healthy)
        )
        for name, (label, description) in _ENGINE_COUNTS_BY.items():
            family = CounterMetricFamily(f"gym_engine_{name}", description, labels=[label])
            for value, count in getattr(engine, name).items():
                family.add_metric([value], count)
            yield family
        yield from _plain("gym_engine", engine, _ENGINE_COUNTS, _ENGINE_STATES)
        for name, description in _ENGINE_TIMES.items():
            yield _histogram(f"gym_engine_{name}_seconds", description, getattr(engine, name))
        yield CounterMetricFamily(
            "gym_api_malformed_tool_calls",
            "Texts of answers that looked like tool calls and are none.",
            value=serving.service.malformed_tool_calls,
        )
        if serving.usage_log is not None:
            yield CounterMetricFamily(
                "gym_api_usage_lost",
                "Lines that the usage log did not take; the process's log has them.",
                value=serving.usage_log.lost,
            )
        if serving.content_filter is not None:
            refused = CounterMetricFamily(
                "gym_filter_refused",
                "Requests and answers that the content filter refused.",
                labels=["direction", "category"],
            )
            for labels, count in serving.content_filter.refused().items():
                refused.add_metric(labels, count)
            yield refused
        if serving.store is not None:
            yield from _plain("gym_variants", serving.store.stats(), _STORE_COUNTS, _STORE_STATES)


def _plain(prefix: str, stats: Any, counts: dict[str, str], states: dict[str, str]) -> Iterator[Metric]:
    for name, description in counts.items():
        yield CounterMetricFamily(f"{prefix}_{name}", description, value=getattr(stats, name))
    for name, description in states.items():
        yield GaugeMetricFamily(f"{prefix}_{name}", description, value=getattr(stats, name))


def _histogram(name: str, description: str, histogram: Any) -> Metric:
    """Convert counts per bucket to Prometheus's cumulative ones."""
    buckets, total = [], 0
    for bound, count in zip([*map(str, histogram.bounds), "+Inf"], histogram.counts, strict=True):
        total += count
        buckets.append((bound, total))
    return HistogramMetricFamily(name, description, buckets=buckets, sum_value=histogram.sum)
