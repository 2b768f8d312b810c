"""Fisher merging: average parameters weighted by their Fisher information in each model.

Matena & Raffel 2022, "Merging Models with Fisher-Weighted Averaging". It needs a pass over data for every model:
`gym soup statistics --kind fisher`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.soup.method import MergeMethod, MethodConfig, TensorTask
from gym_fed.soup.methods._task_vectors import blocks

if TYPE_CHECKING:
    from torch import Tensor


class FisherConfig(MethodConfig):
    floor: Annotated[float, Field(gt=0)] = 1e-6
    """Minimum Fisher information of a weight; if all models have less, the result is their weighted mean."""


class Fisher(MergeMethod):
    """``sum_i w_i F_i delta_i / sum_i w_i F_i`` elementwise (eq. 4 of the paper).

    The paper states it for weights; since all models share a base, it holds for deltas too. ``F_i`` are diagonals of
    the Fisher information, mean squared gradients of the log-likelihood. ``floor`` is the ``fisher_floor`` of the
    authors' code. mergekit has no such method.
    """

    name = "fisher"
    statistics = "fisher diagonals"
    Config = FisherConfig
    config: FisherConfig

    def _merge(self, task: TensorTask) -> Tensor:
        statistics = [self._checked(task, index) for index in range(len(task.deltas))]
        shares, count = task.shares.tolist(), len(task.deltas)
        result = torch.empty(task.deltas.shape[1:])
        for into, values in blocks(result, [*task.deltas, *statistics]):
            sure = [
                np.maximum(value, self.config.floor) * share
                for value, share in zip(values[count:], shares, strict=True)
            ]
            total = sum(value * weight for value, weight in zip(values[:count], sure, strict=True))
            into[:] = total / sum(sure)
        return result

    def _checked(self, task: TensorTask, index: int) -> Tensor:
        given = task.statistics[index]
        if given.numel() != task.deltas[index].numel():
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"tensor {task.name!r}: fisher diagonals {index} have shape {list(given.shape)}, not the tensor's",
            )
        values = given.to(torch.float32).contiguous()
        if not bool((torch.isfinite(values) & (values >= 0)).all()):
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"tensor {task.name!r}: fisher diagonals {index} are not all finite and at least 0",
            )
        return values
