"""FedYogi: FedAdam with an additive update of the second moment.

Reddi et al. 2021, "Adaptive Federated Optimization", alg. 2: ``v <- v - (1 - b2) d^2 sign(v - d^2)``, and the step is
``m / (sqrt(v) + tau)``, without bias correction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.soup.optimizer import OptimizerState, ServerOptimizer
from gym_fed.soup.optimizers.adam import AdamConfig

if TYPE_CHECKING:
    from torch import Tensor


class Yogi(ServerOptimizer):
    name = "yogi"
    Config = AdamConfig
    config: AdamConfig

    def step(self, name: str, aggregate: Tensor, state: OptimizerState) -> Tensor:
        beta_1, beta_2 = self.config.beta_1, self.config.beta_2
        square = aggregate * aggregate
        m = state.update("m", name, aggregate, lambda held: held * beta_1 + aggregate * (1 - beta_1))
        v = state.update(
            "v", name, aggregate, lambda held: held - square * (1 - beta_2) * (held - square).sign()
        )
        return m / (v.sqrt() + self.config.tau)
