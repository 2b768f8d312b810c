"""DeltaSoup: robust aggregators and the recipes that use them. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.soup.aggregator import (
        Aggregator,
        AggregatorConfig,
        aggregator_names,
        build_aggregator,
        get_aggregator,
    )
    from gym_fed.soup.merging import SoupReport, merge
    from gym_fed.soup.screening import NormVerdict, screen_norms

__all__ = [
    "Aggregator",
    "AggregatorConfig",
    "NormVerdict",
    "SoupReport",
    "aggregator_names",
    "build_aggregator",
    "get_aggregator",
    "merge",
    "screen_norms",
]

__getattr__ = lazy(
    __name__,
    Aggregator="gym_fed.soup.aggregator",
    AggregatorConfig="gym_fed.soup.aggregator",
    NormVerdict="gym_fed.soup.screening",
    SoupReport="gym_fed.soup.merging",
    aggregator_names="gym_fed.soup.aggregator",
    build_aggregator="gym_fed.soup.aggregator",
    get_aggregator="gym_fed.soup.aggregator",
    merge="gym_fed.soup.merging",
    screen_norms="gym_fed.soup.screening",
)
