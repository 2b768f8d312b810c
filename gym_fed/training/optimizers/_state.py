"""Optimisers whose state is not a fixed number of values per weight."""

from __future__ import annotations

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.optimizers._made import MadeOptimizer
from gym_fed.training.optimizers.base import TrainedWeight, factored_bytes


class Factored(MadeOptimizer):
    """An optimiser whose second moments are a row and a column per matrix; Shazeer and Stern 2018, algorithm 4."""

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        return factored_bytes(weight)


class Soap(MadeOptimizer):
    """An optimiser with Adam's moments, and a preconditioner and eigenvectors per side of a matrix; Vyas et al.
    2024."""

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        largest = int(config.optimizer_args.get("max_precondition_dim", 10000))
        sides = weight.shape if len(weight.shape) > 1 else ()
        squares = sum(2 * side * side for side in sides if side <= largest)
        return float(weight.itemsize * (2 * weight.numel + squares))
