"""OpenTelemetry spans of rounds, exported by OTLP over gRPC. Nothing is recorded or sent before ``start_tracing``.

A round is one trace. Its trace id and the id of its root span are hashes of the hub's id and the round's number, so
that the hub and its contributors join the same trace without exchanging ids, even after a restart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from gym_fed.core.requirements import require_package
from gym_fed.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

TRACEPARENT = "traceparent"
"""Metadata key of the caller's span, in the format of W3C Trace Context."""
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-01", re.ASCII)
_FLUSH_MILLISECONDS = 5_000

Attributes = Mapping[str, str | int | float]

_provider: TracerProvider | None = None
_outgoing: Callable[[], str] | None = None
_root: ContextVar[RoundTrace | None] = ContextVar("root", default=None)
"""The round whose root span is about to be created."""


class RoundTrace(NamedTuple):
    """The ids of a round's trace and its root span."""

    trace_id: int
    root_id: int

    @classmethod
    def of(cls, server: str, server_round: int | str) -> RoundTrace:
        """Return the ids of a hub's round."""
        digest = hashlib.sha256(f"gym-fed round\0{server}\0{server_round}".encode()).digest()
        return cls(int.from_bytes(digest[:16]), int.from_bytes(digest[16:24]))

    def parent(self, traceparent: str = "") -> int:
        """Return the parent id of a new span: the caller's span, or the root.

        The caller's text controls nothing else: a malformed text, or one from a different trace, is ignored.
        """
        matched = _TRACEPARENT.fullmatch(traceparent[:64])
        if matched is None or int(matched[1], 16) != self.trace_id or not int(matched[2], 16):
            return self.root_id
        return int(matched[2], 16)


def start_tracing(service: str, endpoint: str, what: str) -> None:
    """Start exporting spans.

    Args:
        service: ``service.name`` of the spans.
        endpoint: URL of an OTLP receiver; ``http://`` is plain text, ``https://`` TLS.
        what: The config key, for the error message.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` without the extra ``observe``.
    """
    global _provider
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"):
        require_package(package, what, "observe")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class RoundIds(RandomIdGenerator):
        """Generates random ids, except for root spans, which get those of ``RoundTrace``."""

        def generate_trace_id(self) -> int:
            root = _root.get()
            return super().generate_trace_id() if root is None else root.trace_id

        def generate_span_id(self) -> int:
            root = _root.get()
            return super().generate_span_id() if root is None else root.root_id

    stop_tracing()
    resource = Resource({"service.name": service, "service.version": __version__})
    _provider = TracerProvider(resource=resource, id_generator=RoundIds(), shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))


def stop_tracing() -> None:
    """Export pending spans, for a few seconds at most, and stop recording."""
    global _provider
    provider, _provider = _provider, None
    if provider is not None:
        provider.force_flush(_FLUSH_MILLISECONDS)
        provider.shutdown()


def is_tracing() -> bool:
    """Return True between ``start_tracing`` and ``stop_tracing``."""
    return _provider is not None


def begin_span(
    name: str,
    trace: RoundTrace,
    traceparent: str = "",
    attributes: Attributes | None = None,
    start_seconds: float | None = None,
) -> Span | None:
    """Start a span of a round; the caller ends it. None if tracing is off.

    Args:
        name: The span's name.
        trace: The round's ids.
        traceparent: The parent span, in the format of ``traceparent_of``; by default the root.
        attributes: Attributes, whose names get the prefix ``gym.``.
        start_seconds: Start time in Unix seconds; None for now.
    """
    if _provider is None:
        return None
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    parent = SpanContext(trace.trace_id, trace.parent(traceparent), True, TraceFlags(TraceFlags.SAMPLED))
    return _provider.get_tracer("gym_fed").start_span(
        name,
        set_span_in_context(NonRecordingSpan(parent)),
        attributes=_prefixed(attributes or {}),
        start_time=None if start_seconds is None else int(start_seconds * 1e9),
    )


@contextmanager
def round_span(
    name: str, server: str, server_round: int | str, traceparent: str = "", **attributes: str | int | float
) -> Iterator[Span | None]:
    """Record the block as a span of a round; see ``begin_span``. Only an exception's type is recorded."""
    span = begin_span(name, RoundTrace.of(server, server_round), traceparent, attributes)
    if span is None:
        yield None
        return
    from opentelemetry.trace import Status, StatusCode, use_span

    with use_span(span, end_on_exit=True, record_exception=False, set_status_on_exception=False):
        try:
            yield span
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise


def begin_child(name: str, **attributes: str | int | float) -> Span | None:
    """Start a child span of this thread's current span; None if there is none. The caller ends it."""
    if _provider is None:
        return None
    from opentelemetry.trace import get_current_span

    if not get_current_span().get_span_context().is_valid:
        return None
    return _provider.get_tracer("gym_fed").start_span(name, attributes=_prefixed(attributes))


def record_root(
    server: str, server_round: int, start_seconds: float, end_seconds: float, **attributes: str | int
) -> None:
    """Record the root span of a round that has ended."""
    if _provider is None:
        return
    from opentelemetry.context import Context

    token = _root.set(RoundTrace.of(server, server_round))
    try:
        span = _provider.get_tracer("gym_fed").start_span(
            "round",
            Context(),
            attributes=_prefixed({"round": server_round, **attributes}),
            start_time=int(start_seconds * 1e9),
        )
    finally:
        _root.reset(token)
    span.end(int(end_seconds * 1e9))


def traceparent_of(span: Span | None) -> str:
    """Return a span's ids for the metadata of a call; empty for None."""
    if span is None:
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def set_traceparent(current: Callable[[], str] | None) -> None:
    """Set the function that returns the ids for this process's calls; None means no ids."""
    global _outgoing
    _outgoing = current


def outgoing_metadata() -> tuple[tuple[str, str], ...]:
    """Return the metadata that links a call to the current span; empty unless the contributor traces its tasks."""
    traceparent = "" if _outgoing is None else _outgoing()
    return ((TRACEPARENT, traceparent),) if traceparent else ()


def current_trace_id() -> str:
    """Return the id of the trace that this thread works on, for its log; empty if there is none."""
    if _provider is None:
        return ""
    from opentelemetry.trace import get_current_span

    context = get_current_span().get_span_context()
    return f"{context.trace_id:032x}" if context.is_valid else ""


def _prefixed(attributes: Attributes) -> dict[str, Any]:
    return {f"gym.{name}": value for name, value in attributes.items()}
