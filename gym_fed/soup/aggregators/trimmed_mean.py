"""Weighted coordinate-wise trimmed mean.

Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", definition 2. The ``trim``
largest and the ``trim`` smallest values of each coordinate are dropped, and the others averaged. Trimming counts
contributors, not weights: with ``trim >= f``, every remaining value lies between two honest ones, regardless of the
weight that a malicious client claims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field, model_validator

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import kernels
from gym_fed.core.text import counted
from gym_fed.soup.aggregator import AggregatorConfig, CoordinateRule

if TYPE_CHECKING:
    from torch import Tensor


class TrimmedMeanConfig(AggregatorConfig):
    trim: Annotated[int, Field(ge=0)] | None = None
    """Number of values dropped on each side; at least ``num_malicious_nodes``, the default."""

    @model_validator(mode="after")
    def _enough(self) -> TrimmedMeanConfig:
        if self.trim is not None and self.trim < self.num_malicious_nodes:
            raise ValueError(f"trim {self.trim} is below num_malicious_nodes {self.num_malicious_nodes}")
        return self


class TrimmedMean(CoordinateRule):
    name = "trimmed_mean"
    robust = True
    weighted = True
    bounds_one = True
    Config = TrimmedMeanConfig
    config: TrimmedMeanConfig

    @property
    def trim(self) -> int:
        return self.config.num_malicious_nodes if self.config.trim is None else self.config.trim

    def check(self, weights: Tensor) -> None:
        """Also refuse a ``trim`` that leaves no value."""
        super().check(weights)
        if weights.numel() <= 2 * self.trim:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"trim {self.trim} leaves none of {counted(weights.numel(), 'update')}",
                "lower trim, or wait for more contributors",
            )

    def formula(self, updates: Tensor, weights: Tensor) -> Tensor:
        """Return ``sum_k w_k x_k / sum_k w_k`` over the ranks k from ``trim + 1`` to ``n - trim`` per coordinate."""
        values, order = updates.sort(dim=0, stable=True)
        middle = slice(self.trim, len(updates) - self.trim)
        counted = weights[order][middle]
        return (counted * values[middle]).sum(dim=0) / counted.sum(dim=0)

    def _aggregate(self, updates: Tensor, weights: Tensor) -> Tensor:
        rows = updates.contiguous()
        if bool((weights == weights[0]).all()):
            return kernels.trimmed_mean(rows, self.trim)
        return kernels.weighted_trimmed_mean(rows, weights, self.trim)

    def drops(self, weights: Tensor) -> int | None:
        return self.trim if bool((weights == weights[0]).all()) else None
