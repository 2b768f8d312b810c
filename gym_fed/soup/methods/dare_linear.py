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
    """Probability 1 - p that an element stays; the paper's p is 0.9 and above."""

    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the draws, together with the tensor's name and the place of the model in the list."""


class DareLinear(MergeMethod):
    """Drop every element with probability ``1 - density``, divide the others by ``density``, and average.

    The draws belong to places: the same models in another order give another soup, of the same expectation. PEFT and
    mergekit add up where this takes the mean; give ``scale`` the sum of the weights for theirs. They draw from the
    process's own random numbers, this from the seed alone.
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
