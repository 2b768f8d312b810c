"""Settings of logs and traces, shared by hubs and contributors."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.logs import LogFormat
from gym_fed.core.text import plain


def _validate_endpoint(text: str) -> str:
    shown = plain(text, 80)
    try:
        parts = urlsplit(text)
        has_port = parts.port is not None
    except ValueError as error:
        raise ValueError(f"{shown!r} is not a URL: {error}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not has_port or parts.path.strip("/"):
        raise ValueError(f"{shown!r} is not the URL of an OTLP/gRPC receiver, such as http://127.0.0.1:4317")
    if parts.username is not None:
        raise ValueError("contains a user name; set OTEL_EXPORTER_OTLP_HEADERS in the environment instead")
    return text


OtlpEndpoint = Annotated[str, AfterValidator(_validate_endpoint)]
"""URL of an OpenTelemetry collector that accepts OTLP over gRPC."""


class ObserveConfig(StrictModel):
    """Logs and traces of a hub (docs/observe.md)."""

    log_format: LogFormat = "text"
    """Format of the log on standard error: lines of text, or one JSON object per line."""
    otlp_endpoint: OtlpEndpoint | None = None
    """OTLP/gRPC receiver, such as ``http://127.0.0.1:4317``, which gets a trace of every round. Needs the extra
    ``observe``; by default nothing is sent."""
