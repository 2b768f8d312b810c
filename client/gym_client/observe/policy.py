"""The section ``observe`` of ``policy.yaml``."""

from __future__ import annotations

from pydantic import Field, field_validator

from gym_fed.config.observe import OtlpEndpoint
from gym_fed.config.schema.base import LocalPath, StrictModel


class ObservePolicy(StrictModel):
    """Metrics and traces of this machine's agent, for its owner (docs/observe.md); by default none."""

    textfile: LocalPath | None = None
    """File for node_exporter's textfile collector, whose name ends in ``.prom``."""
    port: int | None = Field(default=None, ge=1, le=65_535)
    """Port on 127.0.0.1 where Prometheus reads ``/metrics``."""
    otlp_endpoint: OtlpEndpoint | None = None
    """Receiver of OTLP over gRPC that gets the spans of tasks. Calls then carry their ids, so that the hub's spans of
    the same round become their children. Needs the extra ``observe``."""

    @field_validator("textfile")
    @classmethod
    def _validate_suffix(cls, path: LocalPath | None) -> LocalPath | None:
        if path is not None and path.suffix != ".prom":
            raise ValueError(f"{path.name}: node_exporter reads only files whose names end in .prom")
        return path
