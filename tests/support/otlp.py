"""A receiver of OTLP over gRPC in this process, which keeps every span that it is sent."""

from __future__ import annotations

import importlib.util
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc", "opentelemetry.proto")


def is_installed() -> bool:
    """True where the extra ``observe`` is installed."""
    try:
        return all(importlib.util.find_spec(name) is not None for name in NEEDED)
    except ModuleNotFoundError:
        return False


needs_otlp = pytest.mark.skipif(
    not is_installed(), reason="the extra observe is not installed (pip install 'gym-fed[observe]')"
)


class OtlpReceiver:
    """Started by making it; close it at the end."""

    def __init__(self) -> None:
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
        from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services

        spans: list[tuple[str, Any]] = []
        lock = threading.Lock()

        class Receiver(services.TraceServiceServicer):  # type: ignore[misc]
            def Export(self, request: Any, context: Any) -> Any:
                with lock:
                    for resource in request.resource_spans:
                        named = {one.key: one.value.string_value for one in resource.resource.attributes}
                        for scope in resource.scope_spans:
                            spans.extend((named["service.name"], span) for span in scope.spans)
                return pb.ExportTraceServiceResponse()

        self._spans, self._lock = spans, lock
        self._server = grpc.server(ThreadPoolExecutor(2))
        services.add_TraceServiceServicer_to_server(Receiver(), self._server)
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    @property
    def spans(self) -> list[tuple[str, Any]]:
        """Each span with the name of its service, in the order of arrival."""
        with self._lock:
            return list(self._spans)

    def close(self) -> None:
        self._server.stop(None)


def attributes_of(span: Any) -> dict[str, Any]:
    """A span's attributes, whatever their types."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
