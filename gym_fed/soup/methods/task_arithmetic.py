"""Task arithmetic: a weighted sum of task vectors.

Ilharco et al. 2023, "Editing Models with Task Arithmetic", sec. 2. ``scale`` is the paper's lambda, which it tunes on
held-out data (0.3 to 0.5 for several tasks). The plain sum overshoots if tasks share a direction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.soup.method import MergeMethod, TensorTask
from gym_fed.soup.methods._task_vectors import combination

if TYPE_CHECKING:
    from torch import Tensor


class TaskArithmetic(MergeMethod):
    """``scale * sum_i w_i delta_i``. Weights are not normalised: a weight of 1 adds the full task vector.

    The paper's weights are all 1; mergekit also multiplies by weights, unless set to normalise them. A negative weight
    subtracts a task from the base (sec. 3, forgetting by negation).
    """

    name = "task_arithmetic"
    negates = True

    def _merge(self, task: TensorTask) -> Tensor:
        return combination(task.deltas, task.weights)
