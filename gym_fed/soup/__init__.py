"""DeltaSoup: robust aggregators and the recipes that use them. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy

if TYPE_CHECKING:
    from gym_fed.soup.aggregator import Aggregator, AggregatorConfig, CoordinateRule, WeightRule
    from gym_fed.soup.geometry import Geometry, Mixture, Needs
    from gym_fed.soup.merging import SoupReport, merge
    from gym_fed.soup.method import MergeMethod, MethodConfig, TensorTask
    from gym_fed.soup.model_merging import ModelMergeReport, merge_models
    from gym_fed.soup.optimizer import OptimizerState
    from gym_fed.soup.pipeline import Pipeline
    from gym_fed.soup.pre_aggregator import PreAggregator
    from gym_fed.soup.registry import (
        aggregator_names,
        build_aggregator,
        get_aggregator,
        get_method,
        get_pre_aggregator,
        method_names,
        pre_aggregator_names,
    )
    from gym_fed.soup.screening import NormVerdict, screen_norms

__all__ = [
    "Aggregator",
    "AggregatorConfig",
    "CoordinateRule",
    "Geometry",
    "MergeMethod",
    "MethodConfig",
    "Mixture",
    "ModelMergeReport",
    "Needs",
    "NormVerdict",
    "OptimizerState",
    "Pipeline",
    "PreAggregator",
    "SoupReport",
    "TensorTask",
    "WeightRule",
    "aggregator_names",
    "build_aggregator",
    "get_aggregator",
    "get_method",
    "get_pre_aggregator",
    "merge",
    "merge_models",
    "method_names",
    "pre_aggregator_names",
    "screen_norms",
]

__getattr__ = lazy(
    __name__,
    Aggregator="gym_fed.soup.aggregator",
    AggregatorConfig="gym_fed.soup.aggregator",
    CoordinateRule="gym_fed.soup.aggregator",
    Geometry="gym_fed.soup.geometry",
    MergeMethod="gym_fed.soup.method",
    MethodConfig="gym_fed.soup.method",
    Mixture="gym_fed.soup.geometry",
    ModelMergeReport="gym_fed.soup.model_merging",
    Needs="gym_fed.soup.geometry",
    NormVerdict="gym_fed.soup.screening",
    OptimizerState="gym_fed.soup.optimizer",
    Pipeline="gym_fed.soup.pipeline",
    PreAggregator="gym_fed.soup.pre_aggregator",
    SoupReport="gym_fed.soup.merging",
    TensorTask="gym_fed.soup.method",
    WeightRule="gym_fed.soup.aggregator",
    aggregator_names="gym_fed.soup.registry",
    build_aggregator="gym_fed.soup.registry",
    get_aggregator="gym_fed.soup.registry",
    get_method="gym_fed.soup.registry",
    get_pre_aggregator="gym_fed.soup.registry",
    merge="gym_fed.soup.merging",
    merge_models="gym_fed.soup.model_merging",
    method_names="gym_fed.soup.registry",
    pre_aggregator_names="gym_fed.soup.registry",
    screen_norms="gym_fed.soup.screening",
)
