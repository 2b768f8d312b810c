"""DARE: drop and rescale, then the weighted mean.

Yu et al. 2024, "Language Models are Super Mario: Absorbing Abilities from Homologous Models as a Free Lunch", sec. 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gym_fed.soup.method import MergeMethod, MethodConfig, TensorTask
from gym_fed.soup.methods._task_vectors import combination, draws, dropped_at_random

if TYPE_CHECKING:
    from torch import Tensor


class DareConfig(MethodConfig):
    density: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Probability 1 - p that an element is kept; the paper's p is 0.9 and above."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the draws, combined with the tensor's name and the model's position in the list."""


class DareLinear(MergeMethod):
    """Drop every element with probability ``1 - density``, divide the others by ``density``, and average.

    The draws depend on positions: the same models in a different order give a different soup with the same expectation.
    PEFT and mergekit use the sum, not the mean; set ``scale`` to the sum of the weights for their result. They use the
    process's random generator; this method uses only the seed.
    """

    name = "dare_linear"
    Config = DareConfig
    config: DareConfig

    def _merge(self, task: TensorTask) -> Tensor:
        density, seed = self.config.density, self.config.seed
        sparse = [
            dropped_at_random(delta, density, draws(seed, task.name, index, delta.shape))
            for index, delta in enumerate(task.deltas)
        ]
        return combination(sparse, task.shares)
