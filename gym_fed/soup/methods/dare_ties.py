"""DARE with TIES: drop and rescale, then elect signs.

Yu et al. 2024, "Language Models are Super Mario: Absorbing Abilities from Homologous Models as a Free Lunch".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.soup.method import MergeMethod, TensorTask
from gym_fed.soup.methods._task_vectors import draws, dropped_at_random, sign_consensus
from gym_fed.soup.methods.dare_linear import DareConfig

if TYPE_CHECKING:
    from torch import Tensor


class DareTies(MergeMethod):
    """TIES with random drops instead of its trim, as in mergekit and PEFT.

    The paper's experiments drop first and then trim. If only one model kept an element, the mean over the models that
    agree leaves it rescaled by ``1 / density``: unlike ``dare_linear`` the result is larger than the deltas' mean.
    """

    name = "dare_ties"
    Config = DareConfig
    config: DareConfig

    def _merge(self, task: TensorTask) -> Tensor:
        density, seed = self.config.density, self.config.seed
        sparse = [
            dropped_at_random(delta, density, draws(seed, task.name, index, delta.shape))
            for index, delta in enumerate(task.deltas)
        ]
        return sign_consensus(sparse, task.weights, votes=task.weights)
