"""Nesterov momentum: ``m <- beta * m + aggregate``, and the step is ``aggregate + beta * m``.

Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models" (arXiv:2311.08105), alg. 1:
the outer optimiser, like torch's SGD with ``nesterov=True``; the paper uses ``momentum: 0.9`` and a
``server_learning_rate`` of 0.7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.soup.optimizer import OptimizerState, ServerOptimizer
from gym_fed.soup.optimizers.momentum import MomentumConfig

if TYPE_CHECKING:
    from torch import Tensor


class Nesterov(ServerOptimizer):
    name = "nesterov"
    Config = MomentumConfig
    config: MomentumConfig

    def step(self, name: str, aggregate: Tensor, state: OptimizerState) -> Tensor:
        m = state.update("m", name, aggregate, lambda m: m.mul(self.config.momentum).add_(aggregate))
        return aggregate + m * self.config.momentum
