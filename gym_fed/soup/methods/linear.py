"""The weighted mean of the fine-tunes (a uniform soup).

Wortsman et al. 2022, "Model soups: averaging weights of multiple fine-tuned models", sec. 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.soup.method import MergeMethod, TensorTask
from gym_fed.soup.methods._task_vectors import combination

if TYPE_CHECKING:
    from torch import Tensor


class Linear(MergeMethod):
    """``sum_i w_i delta_i / sum_i w_i``. All models share a base, so the mean of deltas is the delta of the mean."""

    name = "linear"

    def _merge(self, task: TensorTask) -> Tensor:
        return combination(task.deltas, task.shares)
