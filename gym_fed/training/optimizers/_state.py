"""Optimisers whose state is no fixed number of values for each weight: factors of a matrix, or more than the matrix."""

from __future__ import annotations

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.optimizers._made import MadeOptimizer
from gym_fed.training.optimizers.base import TrainedWeight, factored_bytes


class Factored(MadeOptimizer):
    """Second moments as a row and a column of each matrix; Shazeer and Stern 2018, algorithm 4."""

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        return factored_bytes(weight)


class Soap(MadeOptimizer):
    """Adam's two moments, and of each side of a matrix a preconditioner and its eigenvectors; Vyas et al. 2024."""

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        largest = int(config.optimizer_args.get("max_precondition_dim", 10000))
        sides = weight.shape if len(weight.shape) > 1 else ()
        squares = sum(2 * side * side for side in sides if side <= largest)
        return float(weight.itemsize * (2 * weight.numel + squares))
