"""Multi-Krum: the mean of the updates with the lowest Krum scores.

Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", section 4. Scores are
computed once, as in Flower and ByzFL; Bulyan computes them again after each selection. Ties go to the first in the
order of contributors. It tolerates f malicious clients out of n >= 2f + 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.core.text import counted
from gym_fed.soup.aggregator import AggregatorConfig, WeightRule
from gym_fed.soup.aggregators.krum import krum_scores
from gym_fed.soup.gram import GramMatrix

if TYPE_CHECKING:
    from torch import Tensor


class MultiKrumConfig(AggregatorConfig):
    num_selected: Annotated[int, Field(ge=1)] | None = None
    """Number of updates to average; default and maximum: all but ``num_malicious_nodes``."""


class MultiKrum(WeightRule):
    name = "multi_krum"
    robust = True
    Config = MultiKrumConfig
    config: MultiKrumConfig

    @classmethod
    def minimum(cls, malicious: int) -> int:
        """Return 2f + 3, or 1 if f = 0."""
        return 2 * malicious + 3 if malicious else 1

    def check(self, weights: Tensor) -> None:
        """Also refuse a ``num_selected`` above the number of honest updates."""
        super().check(weights)
        honest = len(weights) - self.num_malicious_nodes
        if (self.config.num_selected or 1) > honest:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"num_selected {self.config.num_selected} exceeds the {counted(honest, 'honest update')} "
                f"({counted(len(weights), 'update')}, num_malicious_nodes: {self.num_malicious_nodes})",
                "lower num_selected, or wait for more contributors",
            )

    def weigh(self, gram: GramMatrix) -> Tensor:
        scores = krum_scores(gram.squared_distances(), self.num_malicious_nodes)
        selected = self.config.num_selected or gram.count - self.num_malicious_nodes
        coefficients = torch.zeros(gram.count, dtype=torch.float64)
        coefficients[np.argsort(scores, kind="stable")[:selected].tolist()] = 1.0 / selected
        return coefficients
