"""DELLA: drop small changes more often than large ones, then elect signs.

Deep et al. 2024, "DELLA-Merging: Reducing Interference in Model Merging through Magnitude-Based Sampling".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field, model_validator

from gym_fed.core.lazy import torch
from gym_fed.soup.method import MergeMethod, MethodConfig, TensorTask
from gym_fed.soup.methods._task_vectors import combination, draws, sign_consensus

if TYPE_CHECKING:
    from torch import Tensor


class DellaConfig(MethodConfig):
    density: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Probability 1 - p that an element of median magnitude is kept."""

    epsilon: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Difference between the drop probabilities of a row's smallest and largest elements."""

    elect_signs: bool = True
    """True to merge only elements that agree in sign, like TIES; False for the weighted mean (mergekit's
    ``della_linear``)."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the draws, combined with the tensor's name and the model's position in the list."""

    @model_validator(mode="after")
    def _probabilities(self) -> DellaConfig:
        if self.density - self.epsilon / 2 <= 0 or self.density + self.epsilon / 2 > 1:
            raise ValueError(
                f"density {self.density} -+ half of epsilon {self.epsilon} must lie above 0 and not above 1"
            )
        return self


class Della(MergeMethod):
    """MAGPRUNE, elect, fuse (sec. 3 of the paper).

    The n elements of a row (the weights into one neuron) are ranked by magnitude, the largest first: rank r is dropped
    with probability ``p_r = p - epsilon/2 + epsilon * r / n`` and otherwise divided by ``1 - p_r``. mergekit's epsilon
    is half of the paper's, its ranks run to 1 exactly, and it rescales to keep a norm instead. Ties go to the lower
    index.
    """

    name = "della"
    Config = DellaConfig
    config: DellaConfig

    def _merge(self, task: TensorTask) -> Tensor:
        sparse = [
            self._pruned(delta, draws(self.config.seed, task.name, index, delta.shape))
            for index, delta in enumerate(task.deltas)
        ]
        if self.config.elect_signs:
            return sign_consensus(sparse, task.weights, votes=task.weights)
        return combination(sparse, task.shares)

    def _pruned(self, delta: Tensor, uniform: Tensor) -> Tensor:
        cols = delta.shape[1]
        by_rank = self.config.density + self.config.epsilon * (0.5 - np.arange(cols) / cols)
        result = torch.zeros_like(delta)
        for row, drawn, into in zip(delta.numpy(), uniform.numpy(), result.numpy(), strict=True):
            keep = np.empty(cols)
            keep[np.argsort(-np.abs(row), kind="stable")] = by_rank
            np.divide(row, keep, out=into, where=drawn < keep, casting="same_kind")
        return result
