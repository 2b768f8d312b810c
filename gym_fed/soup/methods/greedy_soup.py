"""Greedy soup: add models one by one, best first, while the soup does not get worse.

Wortsman et al. 2022, "Model soups: averaging weights of multiple fine-tuned models", alg. 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.core.text import counted
from gym_fed.soup.method import Gate, MergeMethod, MethodConfig, Score, TensorTask
from gym_fed.soup.methods._task_vectors import combination

if TYPE_CHECKING:
    from torch import Tensor


class GreedySoup(MergeMethod):
    """The uniform mean of the models that improve the score on held-out data.

    In order of their own scores (ties: in the order given) each model joins if the mean with it scores at least as well
    as the soup so far. Unlike in the paper, a gate may veto a soup regardless of its score, and NaN scores count as
    worse than any other. mergekit has no such method, since it uses no data.
    """

    name = "greedy_soup"
    uses_score = True
    weighted = False

    def __init__(self, config: MethodConfig) -> None:
        super().__init__(config)
        self._coefficients: Tensor | None = None
        self._steps: list[dict[str, Any]] = []

    def choose(self, weights: Tensor, score: Score, gate: Gate | None = None) -> Tensor:
        self.check(weights)
        count = len(weights)
        alone = [_number(score(_mean([model], count))) for model in range(count)]
        soup: list[int] = []
        best = -math.inf
        self._steps = []
        for model in sorted(range(count), key=lambda index: (-alone[index], index)):
            candidate = _mean(sorted([*soup, model]), count)
            value = _number(score(candidate)) if soup else alone[model]
            veto = gate(candidate) if gate is not None and value >= best else None
            if value == -math.inf:
                why = "has no finite score"
            elif value < best:
                why = f"the soup would score {value:.6g}, not {best:.6g}"
            else:
                why = veto or ""
            self._steps.append(
                {"model": model, "alone": _plain(alone[model]), "score": _plain(value), "refused": why}
            )
            if not why:
                soup, best = [*soup, model], value
        if not soup:
            reasons = "; ".join(f"{step['model']}: {step['refused']}" for step in self._steps)
            raise GymError(ErrorCode.UPDATE_REFUSED, f"no model may join the soup ({reasons})")
        self._coefficients = _mean(sorted(soup), count)
        return self._coefficients

    def _merge(self, task: TensorTask) -> Tensor:
        if self._coefficients is None or len(self._coefficients) != len(task.deltas):
            raise GymError(
                ErrorCode.USAGE,
                f"merge method {self.name!r}: call choose for {counted(len(task.deltas), 'model')} before merging",
            )
        return combination(task.deltas, self._coefficients)

    def report(self) -> Mapping[str, Any]:
        """Return ``steps``, one per model in the order tried, with its score and the soup's score.

        A rejected model also has a reason. Non-finite scores are None.
        """
        return {"steps": [dict(step) for step in self._steps]}


def _mean(models: list[int], count: int) -> Tensor:
    coefficients = torch.zeros(count, dtype=torch.float64)
    coefficients[models] = 1.0 / len(models)
    return coefficients


def _number(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def _plain(score: float) -> float | None:
    return score if math.isfinite(score) else None
