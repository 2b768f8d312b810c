"""What every merge method promises: fine-tunes of one base, tensor by tensor, made one delta.

Aggregators distrust the updates they get; merge methods trust them, and ask how tasks can share a model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from gym_fed.errors import ErrorCode, GymError
from gym_fed.soup.rule import Rule, RuleConfig


class MethodConfig(RuleConfig):
    """What every merge method knows; a method with settings of its own derives from this."""

    scale: float = Field(1.0)
    """The merged delta is multiplied by it (lambda of task arithmetic)."""


@dataclass(frozen=True)
class TensorTask:
    """One tensor of a merge.

    Attributes:
        name: Its name in the model; also what random methods draw from, beside their seed.
        deltas: ``[n, rows, cols]`` float32: each fine-tune's change, its last dimension against all others.
        weights: ``[n]`` float64, positive.
        base: ``[rows, cols]`` float32, the base's tensor; None unless the method asks for it.
        statistics: What the method's ``statistics`` names, a tensor for each fine-tune.
    """

    name: str
    deltas: Tensor
    weights: Tensor
    base: Tensor | None = None
    statistics: Sequence[Tensor] = field(default_factory=tuple)

    @property
    def shares(self) -> Tensor:
        """``[n]`` float64, the weights made to add up to one."""
        return self.weights / self.weights.sum()


class MergeMethod(Rule):
    """One way to merge models that are trusted.

    To add one, put a file with a subclass into ``gym_fed/soup/methods``, named like the method. Give ``merge_tensor``;
    a method that chooses among whole models overrides ``choose``.
    """

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    config: MethodConfig

    uses_base: ClassVar[bool] = False
    """Whether ``merge_tensor`` reads the base's weights."""

    statistics: ClassVar[str | None] = None
    """What each fine-tune must bring beside its delta, in words (``fisher diagonals``); None for nothing."""

    uses_score: ClassVar[bool] = False
    """Whether the method asks how good a candidate is on held-out data."""

    def merge_tensor(self, task: TensorTask) -> Tensor:
        """The merged delta of one tensor.

        Returns:
            ``[rows, cols]`` float32, multiplied by ``scale``.

        Raises:
            GymError: ``USAGE`` for weights or shapes that do not fit, ``UPDATE_REFUSED`` for values not finite.
        """
        if task.deltas.dim() != 3 or task.weights.shape != task.deltas.shape[:1] or not len(task.deltas):
            raise GymError(
                ErrorCode.USAGE,
                f"tensor {task.name!r}: deltas {list(task.deltas.shape)} and weights "
                f"{list(task.weights.shape)} do not fit",
            )
        if not bool((torch.isfinite(task.weights) & (task.weights > 0)).all()):
            raise GymError(
                ErrorCode.USAGE, f"weights {task.weights.tolist()} are not all positive and finite"
            )
        for index, delta in enumerate(task.deltas):
            if not bool(torch.isfinite(delta).all()):
                raise GymError(
                    ErrorCode.UPDATE_REFUSED,
                    f"tensor {task.name!r}: update {index} holds values that are not finite",
                )
        if self.uses_base and task.base is None:
            raise GymError(ErrorCode.USAGE, f"merge method {self.name!r} needs the base's weights")
        if self.statistics is not None and len(task.statistics) != len(task.deltas):
            raise GymError(
                ErrorCode.USAGE,
                f"tensor {task.name!r}: merge method {self.name!r} needs {self.statistics} of "
                f"{len(task.deltas)} fine-tunes, not of {len(task.statistics)}",
            )
        return self._merge(task).to(torch.float32).mul_(self.config.scale)

    @abstractmethod
    def _merge(self, task: TensorTask) -> Tensor:
        """The method itself, on checked input, before ``scale``; may not change its input."""

    def report(self) -> Mapping[str, Any]:
        """What the last merge is worth telling of (which models were chosen, for one); plain values."""
        return {}
