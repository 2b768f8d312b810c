"""Counters and histograms of the engine, in Prometheus's form. The module does not import torch."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_RECENT = 32


@dataclass(frozen=True)
class Histogram:
    """A histogram of observations.

    Attributes:
        bounds: Upper bounds of the buckets, in seconds.
        counts: Observations in each bucket (not cumulative), and above the last bound.
        sum: The sum of all observations.
    """

    bounds: tuple[float, ...] = _SECONDS
    counts: tuple[int, ...] = (0,) * (len(_SECONDS) + 1)
    sum: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine; counters are since its start.

    Attributes:
        healthy: True if its loop is running and its last steps did not all fail.
        running: Running requests.
        queued: Waiting requests.
        finished: Number of finished requests by finish reason: stop, length, cancelled or error.
        refused: Requests that were refused because too many waited.
        prompt_tokens: Prefilled tokens, including those computed again after a preemption.
        generated_tokens: Sampled tokens.
        embeddings: Finished embeddings.
        steps: Forward passes of the model.
        failed_steps: Forward passes that raised.
        forwards: Forward passes by implementation (``MultiVariantModel.forwards``): ``decoder``, ``transformers``,
            ``general``.
        rows: Chunks in all steps; a step has one for each of its requests.
        rows_with_variants: Chunks for a variant.
        sign_products: Multiplications of a layer's sign deltas, by kernel (``MultiVariantModel.sign_products``).
        packed_products: Multiplications of a layer's other packed deltas, by form
            (``MultiVariantModel.packed_products``).
        busy_seconds: Seconds in steps, admission included.
        model_seconds: Seconds in forward passes.
        preemptions: Number of times that a running request was preempted and later computed again.
        cached_tokens: Tokens of prompts that were in the prefix cache.
        proposed_tokens: Tokens that speculative decoding proposed.
        accepted_tokens: Proposed tokens that were also sampled.
        kv_bytes_used: Bytes of the KV blocks that running requests hold.
        kv_bytes_limit: ``kv_cache_size`` in bytes, without a draft's part.
        first_token: Seconds from submission to the first token.
        per_token: Seconds from one token of an answer to the next.
    """

    healthy: bool
    running: int
    queued: int
    finished: Mapping[str, int]
    refused: int
    prompt_tokens: int
    generated_tokens: int
    embeddings: int
    steps: int
    failed_steps: int
    forwards: Mapping[str, int]
    rows: int
    rows_with_variants: int
    sign_products: Mapping[str, int]
    packed_products: Mapping[str, int]
    busy_seconds: float
    model_seconds: float
    preemptions: int
    cached_tokens: int
    proposed_tokens: int
    accepted_tokens: int
    kv_bytes_used: int
    kv_bytes_limit: int
    first_token: Histogram
    per_token: Histogram


class _Buckets:
    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def snapshot(self) -> Histogram:
        return Histogram(_SECONDS, tuple(self._counts), self._sum)


@dataclass
class Counters:
    """Counters of the loop, written by one thread."""

    finished: Counter[str] = field(
        default_factory=lambda: Counter({"stop": 0, "length": 0, "cancelled": 0, "error": 0})
    )
    prompt_tokens: int = 0
    generated_tokens: int = 0
    embeddings: int = 0
    steps: int = 0
    failed_steps: int = 0
    failed_in_a_row: int = 0
    rows: int = 0
    rows_with_variants: int = 0
    busy_seconds: float = 0.0
    model_seconds: float = 0.0
    preemptions: int = 0
    cached_tokens: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    kv_bytes_used: int = 0
    first_token: _Buckets = field(default_factory=_Buckets)
    per_token: _Buckets = field(default_factory=_Buckets)
    _services: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def served(self, started: float) -> None:
        """Record the end of a request that began to run at ``started`` (``time.monotonic``)."""
        self._services.append(time.monotonic() - started)

    def snapshot(self, **gauges: Any) -> EngineStats:
        """Return the counters with the other fields of ``EngineStats``, the gauges."""
        return EngineStats(
            **{name: getattr(self, name) for name in _SHARED_COUNTS},
            finished=dict(self.finished),
            first_token=self.first_token.snapshot(),
            per_token=self.per_token.snapshot(),
            **gauges,
        )

    def seconds_a_request(self) -> float | None:
        """Return the mean seconds from a request's first step to its end, over the last 32; None before the first."""
        services = tuple(self._services)
        return sum(services) / len(services) if services else None


_SHARED_COUNTS = tuple(
    each.name
    for each in fields(EngineStats)
    if each.type in ("int", "float") and hasattr(Counters, each.name)
)
"""Names of the fields that ``EngineStats`` copies from ``Counters`` unchanged."""
