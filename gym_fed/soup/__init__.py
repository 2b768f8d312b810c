"""DeltaSoup: robust aggregators and the recipes that use them."""

from gym_fed.soup.aggregator import (
    Aggregator,
    AggregatorConfig,
    aggregator_names,
    build_aggregator,
    get_aggregator,
)
from gym_fed.soup.merge import SoupReport, merge
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
