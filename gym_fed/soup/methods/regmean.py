"""RegMean: linear layers that reproduce each model's outputs on its own inputs.

Jin et al. 2023, "Dataless Knowledge Fusion by Merging Weights of Language Models". Needs a pass over data for every
model: `gym soup statistics --kind moments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.soup.method import MergeMethod, MethodConfig, TensorTask
from gym_fed.soup.methods._task_vectors import combination

if TYPE_CHECKING:
    from torch import Tensor


class RegmeanConfig(MethodConfig):
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.9
    """Factor of the off-diagonal elements of the second moments."""

    floor: Annotated[float, Field(gt=0, lt=1)] = 1e-6
    """Ridge added to every diagonal, as a share of the mean diagonal: inputs that no text reached are merged by the
    mean."""


class Regmean(MergeMethod):
    """Minimise ``sum_i w_i |X_i W - X_i W_i|**2`` for the merged layer ``W`` over the inputs ``X_i`` (eq. 1, 2).

    With weights as ``[out, in]`` and ``G_i = X_i^T X_i`` that is ``W = (sum_i w_i W_i G_i) (sum_i w_i G_i)^-1``. Every
    ``W_i`` is the same base plus ``delta_i``, so the base cancels out and the formula holds for deltas: no weights of
    the base are needed. ``G_i`` are means over tokens (`gym soup statistics --kind moments`); token counts as weights
    give the paper's sums, and equal weights count every model's inputs equally. ``alpha`` is the paper's (sec. 4.3).
    Tensors without moments (embeddings, norms, biases) get the weighted mean, as in the paper, and are named in the
    report.

    The system is solved on one thread, since the last bits of a factorisation depend on the number of threads.
    """

    name = "regmean"
    statistics = "input second moments [cols, cols]"
    statistics_optional = True
    Config = RegmeanConfig
    config: RegmeanConfig

    def __init__(self, config: RegmeanConfig) -> None:
        super().__init__(config)
        self._averaged: list[str] = []

    def _merge(self, task: TensorTask) -> Tensor:
        from gym_fed.soup.low_rank import one_thread

        if not task.statistics:
            self._averaged.append(task.name)
            return combination(task.deltas, task.shares)
        cols = task.deltas.shape[2]
        moments = [self._checked(task, index) for index in range(len(task.deltas))]
        level = sum(
            float(m.diagonal().mean()) * s for m, s in zip(moments, task.shares.tolist(), strict=True)
        )
        if not level:
            return combination(task.deltas, task.shares)
        total = torch.zeros(cols, cols, dtype=torch.float64)
        answers = torch.zeros(task.deltas.shape[1:], dtype=torch.float64)
        with one_thread():
            for delta, moment, share in zip(task.deltas, moments, task.shares.tolist(), strict=True):
                moment.diagonal().add_(self.config.floor * level)
                total += moment * share
                answers += delta.double() @ moment * share
            factor, failed = torch.linalg.cholesky_ex(total)
            if int(failed):
                raise GymError(ErrorCode.DATA_INVALID, f"tensor {task.name!r}: the moments sum to zero")
            return torch.cholesky_solve(answers.T, factor).T

    def _checked(self, task: TensorTask, index: int) -> Tensor:
        """Return a float64 copy of the moments, with the off-diagonal shrunk."""
        given, cols = task.statistics[index], task.deltas.shape[2]
        if given.shape != (cols, cols):
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"tensor {task.name!r}: moments {index} have shape {list(given.shape)}, not {[cols, cols]}",
            )
        moment = given.to(torch.float64)
        symmetric = float((moment - moment.T).abs().max()) <= 1e-5 * float(moment.abs().max())
        if not (symmetric and bool((moment.diagonal() >= 0).all()) and bool(torch.isfinite(moment).all())):
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"tensor {task.name!r}: moments {index} are not valid second moments: they must be symmetric and "
                "finite, with squares of at least 0",
            )
        shrunk = moment * self.config.alpha
        shrunk.diagonal().copy_(moment.diagonal())
        return (shrunk + shrunk.T) / 2

    def report(self) -> Mapping[str, Any]:
        return {"merged_by_mean": list(self._averaged)}
