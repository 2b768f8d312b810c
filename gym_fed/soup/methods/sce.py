"""SCE: select, calculate, erase.

Wan et al. 2024, "FuseChat: Knowledge Fusion of Chat Models".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from gym_fed.core.lazy import torch
from gym_fed.soup.method import MergeMethod, MethodConfig, TensorTask
from gym_fed.soup.methods._task_vectors import blocks, largest, sign_consensus, whole_share

if TYPE_CHECKING:
    from torch import Tensor


class SceConfig(MethodConfig):
    select: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share tau of each tensor to merge: the elements in which the models differ most; rounded up to whole elements."""


class Sce(MergeMethod):
    """Merge each tensor in three steps.

    1. Select the elements with the largest variance of the deltas over the models; elements with zero variance are
       selected only if ``select`` is 1.
    2. Calculate a coefficient for every model: the sum of its squared selected elements, as a share of all models'.
    3. Erase elements whose sign differs from that of the sum of the deltas, and divide by the coefficients of the rest.

    This matches the authors' code in mergekit, except for sums of exactly zero (it elects plus; here all are erased)
    and for ``select``, there a share of the elements with nonzero variance. The coefficients depend only on
    the deltas, so models have no weights.
    """

    name = "sce"
    Config = SceConfig
    config: SceConfig
    weighted = False

    def _merge(self, task: TensorTask) -> Tensor:
        selected = self._selected(task.deltas)
        squares = torch.tensor(
            [float(np.square(delta[selected].double().numpy()).sum()) for delta in task.deltas],
            dtype=torch.float64,
        )
        if not bool(squares.any()):
            return torch.zeros(task.deltas.shape[1:])
        sparse = [torch.where(selected, delta, 0.0) for delta in task.deltas]
        return sign_consensus(sparse, squares / squares.max(), votes=torch.ones_like(squares))

    def _selected(self, deltas: Tensor) -> Tensor:
        """Return a ``[rows, cols]`` bool mask of the selected elements."""
        if self.config.select == 1.0:
            return torch.ones(deltas.shape[1:], dtype=torch.bool)
        variance = _variance(deltas)
        size = variance.numel()
        count = size - whole_share(1.0 - self.config.select, size)
        return largest(variance, count) & (variance > 0)


def _variance(deltas: Tensor) -> Tensor:
    """Return the ``[rows, cols]`` float64 variance over the models; exactly zero where all are equal."""
    result = torch.empty(deltas.shape[1:], dtype=torch.float64)
    for into, values in blocks(result, deltas):
        mean = sum(values) / len(values)
        equal = np.logical_and.reduce([value == values[0] for value in values])
        into[:] = np.where(equal, 0.0, sum(np.square(value - mean) for value in values) / len(values))
    return result
