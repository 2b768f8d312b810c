"""FedAdam: Adam on the round's aggregate.

Reddi et al. 2021, "Adaptive Federated Optimization", alg. 2: ``m <- b1 m + (1 - b1) d``, ``v <- b2 v + (1 - b2) d^2``,
and the step is ``m / (sqrt(v) + tau)``. Flower adds Adam's bias correction of both moments
(``sqrt(1 - b2^(t+1)) / (1 - b1^(t+1))`` in round t), and so does this optimiser.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gym_fed.soup.optimizer import OptimizerState, ServerOptimizer
from gym_fed.soup.rule import RuleConfig

if TYPE_CHECKING:
    from torch import Tensor


class AdamConfig(RuleConfig):
    beta_1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta_2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    tau: Annotated[float, Field(gt=0)] = 1e-3
    """Degree of adaptivity: added to the root of the second moment."""


class Adam(ServerOptimizer):
    name = "adam"
    Config = AdamConfig
    config: AdamConfig

    def step(self, name: str, aggregate: Tensor, state: OptimizerState) -> Tensor:
        beta_1, beta_2 = self.config.beta_1, self.config.beta_2
        square = aggregate * aggregate
        m = state.update("m", name, aggregate, lambda held: held * beta_1 + aggregate * (1 - beta_1))
        v = state.update("v", name, aggregate, lambda held: held * beta_2 + square * (1 - beta_2))
        correction = math.sqrt(1 - beta_2 ** (state.step + 1)) / (1 - beta_1 ** (state.step + 1))
        return m / (v.sqrt() + self.config.tau) * correction
