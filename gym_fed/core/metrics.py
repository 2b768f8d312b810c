"""Tables of Prometheus metrics: one row per family, so that `/metrics`, the pages and the dashboards use the same
names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Value = float | Mapping[Any, float]
"""A number, or numbers by label values."""


class MetricRow(NamedTuple):
    """One family of metrics.

    No label may have values that a contributor or user chooses, since their number would be unbounded.

    Attributes:
        name: Name without the suffix ``_total`` of counters.
        description: The family's HELP text.
        labels: Names of the labels.
        kind: Prometheus metric type.
    """

    name: str
    description: str
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter", "histogram"] = "gauge"

    @property
    def series(self) -> str:
        """Return the name to use in queries; for a histogram, that of its buckets."""
        return self.name + {"gauge": "", "counter": "_total", "histogram": "_bucket"}[self.kind]

    def family(self, value: Value) -> Metric:
        """Return the family with its values."""
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        if not isinstance(value, Mapping):
            return kind(self.name, self.description, value=value)
        family = kind(self.name, self.description, labels=self.labels)
        for labels, number in sorted(value.items(), key=lambda item: str(item[0])):
            family.add_metric([labels] if isinstance(labels, str) else labels, number)
        return family


class MetricTable(Collector):
    """A collector for the values of a table; a family without a value is omitted."""

    def __init__(self, rows: Iterable[MetricRow], values: Mapping[str, Value | None]) -> None:
        self._rows, self._values = {row.name: row for row in rows}, values
        if unknown := self._values.keys() - self._rows.keys():
            raise ValueError(f"no row of the table is named {', '.join(sorted(unknown))}")

    def collect(self) -> Iterator[Metric]:
        for name, row in self._rows.items():
            if (value := self._values.get(name)) is not None:
                yield row.family(value)


def exposition(rows: Iterable[MetricRow], values: Mapping[str, Value | None]) -> bytes:
    """Return a table's values in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(MetricTable(rows, values))
    return generate_latest(registry)
