"""Server momentum: ``m <- beta * m + aggregate``, and the step is ``m``.

Hsu et al. 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
sec. 4.3 (FedAvgM), with momentum as in torch's SGD.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gym_fed.soup.optimizer import OptimizerState, ServerOptimizer
from gym_fed.soup.rule import RuleConfig

if TYPE_CHECKING:
    from torch import Tensor


class MomentumConfig(RuleConfig):
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """The momentum factor, beta."""


class Momentum(ServerOptimizer):
    name = "momentum"
    Config = MomentumConfig
    config: MomentumConfig

    def step(self, name: str, aggregate: Tensor, state: OptimizerState) -> Tensor:
        return state.update("m", name, aggregate, lambda m: m.mul(self.config.momentum).add_(aggregate))
