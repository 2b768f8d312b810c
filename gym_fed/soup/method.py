"""The interface of merge methods, which merge fine-tunes of one base, tensor by tensor, into one delta.

Aggregators expect malicious updates; merge methods trust all updates and combine several tasks in one model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np
from pydantic import Field, field_validator

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch
from gym_fed.core.text import counted
from gym_fed.soup.rule import Rule, RuleConfig

if TYPE_CHECKING:
    from torch import Tensor

Score: TypeAlias = "Callable[[Tensor], float]"
"""A function from ``[n]`` float64 coefficients of the deltas to the soup's score on held-out data; higher is better."""

Gate: TypeAlias = "Callable[[Tensor], str | None]"
"""A function from ``[n]`` float64 coefficients to the reason why the soup is forbidden, or None if it is allowed."""


class MethodConfig(RuleConfig):
    """The settings of every merge method; methods with more settings derive from it."""

    scale: float = Field(1.0)
    """Factor of the merged delta (lambda of task arithmetic)."""

    @field_validator("num_malicious_nodes")
    @classmethod
    def _trusting(cls, malicious: int) -> int:
        if malicious:
            raise ValueError(
                "merge methods trust every model and withstand no malicious client; use an aggregator"
            )
        return malicious


@dataclass(frozen=True)
class TensorTask:
    """One tensor of a merge.

    Attributes:
        name: Its name in the model; random methods derive their draws from it and their seed.
        deltas: ``[n, rows, cols]`` float32 change of each fine-tune; cols is the last dimension, rows all others.
        weights: ``[n]`` float64, positive unless the method ``negates``.
        base: ``[rows, cols]`` float32, the base's tensor; None unless the method needs it.
        statistics: The method's ``statistics``, one tensor per fine-tune.
    """

    name: str
    deltas: Tensor
    weights: Tensor
    base: Tensor | None = None
    statistics: Sequence[Tensor] = field(default_factory=tuple)

    @property
    def shares(self) -> Tensor:
        """``[n]`` float64 weights that sum to one."""
        return self.weights / self.weights.sum()


class MergeMethod(Rule):
    """A method to merge trusted models.

    To add one, put a file with a subclass into ``gym_fed/soup/methods``, named like the method. Implement ``_merge``; a
    method that chooses among whole models also overrides ``choose``.
    """

    Config: ClassVar[type[MethodConfig]] = MethodConfig
    config: MethodConfig

    uses_base: ClassVar[bool] = False
    """True if ``merge_tensor`` reads the base's weights."""

    weighted: ClassVar[bool] = True
    """True if the method is defined for models of unequal weight."""

    negates: ClassVar[bool] = False
    """True if negative weights are allowed, which subtract a fine-tune from the base."""

    minimum: ClassVar[int] = 1
    """Minimum number of models."""

    statistics: ClassVar[str | None] = None
    """Name of the statistics that each fine-tune needs besides its delta (``fisher diagonals``); None if it needs
    none."""

    statistics_optional: ClassVar[bool] = False
    """True if the method can merge a tensor for which no fine-tune has statistics."""

    uses_score: ClassVar[bool] = False
    """True if the method scores candidates on held-out data."""

    def merge_tensor(self, task: TensorTask) -> Tensor:
        """Merge the deltas of one tensor.

        Returns:
            ``[rows, cols]`` float32, multiplied by ``scale``.

        Raises:
            GymError: ``USAGE`` for wrong weights or shapes and for missing statistics, ``CONFIG_INVALID`` for too few
                models or weights that the method would ignore, ``UPDATE_REFUSED`` for inputs or results that are not
                finite.
        """
        if task.deltas.dim() != 3 or task.weights.shape != task.deltas.shape[:1] or not len(task.deltas):
            raise GymError(
                ErrorCode.USAGE,
                f"tensor {task.name!r}: deltas {list(task.deltas.shape)} and weights "
                f"{list(task.weights.shape)} do not match",
            )
        self.check(task.weights)
        for index, delta in enumerate(task.deltas):
            if not bool(torch.isfinite(delta).all()):
                raise GymError(
                    ErrorCode.UPDATE_REFUSED,
                    f"tensor {task.name!r}: update {index} has values that are not finite",
                )
        if self.uses_base and task.base is None:
            raise GymError(ErrorCode.USAGE, f"merge method {self.name!r} needs the base's weights")
        excused = self.statistics_optional and not task.statistics
        if self.statistics is not None and not excused and len(task.statistics) != len(task.deltas):
            raise GymError(
                ErrorCode.USAGE,
                f"tensor {task.name!r}: merge method {self.name!r} needs {self.statistics} of "
                f"{len(task.deltas)} fine-tunes, not of {len(task.statistics)}",
            )
        with np.errstate(over="ignore"):  # reported below with the tensor's name
            merged = self._merge(task).to(torch.float32).mul_(self.config.scale)
        if not bool(torch.isfinite(merged).all()):
            raise GymError(ErrorCode.UPDATE_REFUSED, f"tensor {task.name!r}: the merge overflows float32")
        return merged

    def check(self, weights: Tensor) -> None:
        """Refuse models that the method cannot merge, given their ``[n]`` weights.

        Raises:
            GymError: ``USAGE`` for weights that are not positive (or zero, if the method ``negates``),
                ``CONFIG_INVALID`` for too few models and for weights that the method would ignore.
        """
        allowed = (weights != 0) if self.negates else (weights > 0)
        if not bool((torch.isfinite(weights) & allowed).all()):
            kind = "other than zero" if self.negates else "positive"
            raise GymError(
                ErrorCode.USAGE,
                f"merge method {self.name!r}: weights {weights.tolist()} are not all {kind} and finite",
                "" if self.negates else "to subtract a fine-tune from the base, use --rule task_arithmetic",
            )
        if len(weights) < self.minimum:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"merge method {self.name!r} needs at least {counted(self.minimum, 'model')}, not {len(weights)}",
            )
        if not self.weighted and bool((weights != weights[0]).any()):
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"merge method {self.name!r} treats every model alike, but the weights differ",
                "omit the weights, or use a weighted method such as linear or ties",
            )

    def choose(self, weights: Tensor, score: Score, gate: Gate | None = None) -> Tensor:
        """Select among whole models before their tensors are merged; called once per merge if ``uses_score``.

        Args:
            weights: ``[n]`` float64, positive.
            score: Function that scores a combination of the deltas.
            gate: Function that may forbid a combination; None forbids none.

        Returns:
            ``[n]`` float64, the coefficients that ``merge_tensor`` uses from now on.
        """
        raise NotImplementedError(f"merge method {self.name!r} does not select models")

    @abstractmethod
    def _merge(self, task: TensorTask) -> Tensor:
        """Merge checked input, before ``scale`` is applied; must not change its input."""

    def report(self) -> Mapping[str, Any]:
        """Return plain values to report, such as the models that were chosen."""
        return {}
