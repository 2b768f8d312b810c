"""The elements of the tables: panels with queries, alerts, and functions that build PromQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["short", "s", "bytes", "Bps", "reqps", "ops", "percentunit", "bool", "nats"]


@dataclass(frozen=True)
class Alert:
    """An alert rule.

    Attributes:
        name: Name in CamelCase, also used in the table of the page.
        expression: PromQL that returns a result while something is wrong.
        wait: Time for which it must return one, such as ``5m``.
        when: What is wrong, in a few words.
        remedy: What to do.
        is_critical: True if contributors or users notice it now.
        threshold: Value of a line in the panel; None for no line.
    """

    name: str
    expression: str
    wait: str
    when: str
    remedy: str
    is_critical: bool = False
    threshold: float | None = None


@dataclass(frozen=True)
class Panel:
    """A panel of a dashboard.

    Attributes:
        title: The panel's title.
        unit: Unit of its values.
        queries: PromQL by legend; a legend may contain ``{{label}}``.
        alerts: The alerts about the values that it shows.
        is_number: True to show the last values as numbers instead of lines.
    """

    title: str
    unit: Unit
    queries: Mapping[str, str]
    alerts: Sequence[Alert] = ()
    is_number: bool = False


def share(part: str, whole: str) -> str:
    """Return the PromQL of a share per instance, which has no result while the whole is zero."""
    return f"sum by (instance) ({part}) / (sum by (instance) ({whole}) > 0)"


def share_or_zero(part: str, whole: str) -> str:
    """Return the PromQL of ``share``, but 0 if the part is missing or the whole is zero."""
    return f"({share(part, whole)}) or (0 * sum by (instance) ({whole}))"


def quantile(q: float, name: str, by: str = "", where: str = "") -> str:
    """Return the PromQL of a quantile of a histogram over five minutes."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({name}_bucket{where}[5m])))"


def rate(name: str, by: str = "") -> str:
    """Return the PromQL of a counter's increase per second over five minutes."""
    return f"sum by ({by}) (rate({name}[5m]))" if by else f"rate({name}[5m])"
