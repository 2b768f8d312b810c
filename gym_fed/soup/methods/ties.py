"""TIES: trim, elect sign, merge.

Yadav et al. 2023, "TIES-Merging: Resolving Interference When Merging Models", alg. 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from gym_fed.soup.method import MergeMethod, MethodConfig, TensorTask
from gym_fed.soup.methods._task_vectors import sign_consensus, trimmed

if TYPE_CHECKING:
    from torch import Tensor


class TiesConfig(MethodConfig):
    density: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Share of each tensor's elements to keep, the largest magnitudes first; rounded up to whole elements."""


class Ties(MergeMethod):
    """Drop small changes as noise; if signs conflict, keep the changes whose sign has the larger total weight.

    The paper keeps the top 20% of the entire task vector; here, as in mergekit and PEFT, the share is per tensor, so
    that only one tensor is in memory. Weights, all 1 in the paper, multiply the votes for a sign and the terms of the
    mean. Ties in magnitude go to the lower index; the paper's code keeps all of them.
    """

    name = "ties"
    Config = TiesConfig
    config: TiesConfig

    def _merge(self, task: TensorTask) -> Tensor:
        sparse = [trimmed(delta, self.config.density) for delta in task.deltas]
        return sign_consensus(sparse, task.weights, votes=task.weights)
