"""What the tables are made of: a panel with its queries, and the alerts about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Unit = Literal["short", "s", "bytes", "Bps", "reqps", "ops", "percentunit", "bool", "nats"]


@dataclass(frozen=True)
class Alert:
    """One alert rule.

    Attributes:
        name: Name in CamelCase; the page's table has it too.
        expression: PromQL that has a result while something is wrong.
        wait: How long it must have one, such as ``5m``.
        when: What is wrong, in a few words.
        remedy: What to do.
        is_critical: True if contributors or users notice it now.
        threshold: Line in the panel; None for none.
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
    """One panel of a dashboard.

    Attributes:
        title: The panel's title.
        unit: Unit of its values.
        queries: PromQL by legend; a legend may hold ``{{label}}``.
        alerts: The alerts about what it shows.
        is_number: True to show the last values as numbers instead of lines.
    """

    title: str
    unit: Unit
    queries: Mapping[str, str]
    alerts: Sequence[Alert] = ()
    is_number: bool = False


def share(part: str, whole: str) -> str:
    """Return the PromQL of a share by instance; no result while the whole is zero."""
    return f"sum by (instance) ({part}) / (sum by (instance) ({whole}) > 0)"


def share_or_zero(part: str, whole: str) -> str:
    """Return the PromQL of ``share`` with 0 where there is no part or no whole."""
    return f"({share(part, whole)}) or (0 * sum by (instance) ({whole}))"


def quantile(q: float, name: str, by: str = "", where: str = "") -> str:
    """Return the PromQL of a quantile of a histogram over five minutes."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({name}_bucket{where}[5m])))"


def rate(name: str, by: str = "") -> str:
    """Return the PromQL of a counter's increase per second over five minutes."""
    return f"sum by ({by}) (rate({name}[5m]))" if by else f"rate({name}[5m])"
