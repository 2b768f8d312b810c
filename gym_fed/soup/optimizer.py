"""Server optimisers: what the server makes of a round's aggregate before it becomes the soup.

Reddi et al. 2021, "Adaptive Federated Optimization", alg. 2: the aggregated delta is taken for a (negative) gradient,
and an ordinary optimiser steps along it. The formulas are those of Flower's FedAvgM, FedAdam and FedYogi, with whose
results the tests compare.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from gym_fed.delta import ErrorFeedback
from gym_fed.soup.rule import Rule

_STEP = "step"


class OptimizerState:
    """Moments by tensor, float32: those that the last round left, and those that this round makes of them."""

    def __init__(self, held: Mapping[str, Tensor] | None = None) -> None:
        """Begin from nothing, or from what ``load`` found."""
        self._held = dict(held or {})
        self._next: dict[str, Tensor] = {}

    @classmethod
    def load(cls, path: str | Path, lineage: str) -> OptimizerState:
        """Read a staged state; where there is no file yet, all moments are zero.

        Args:
            path: The file.
            lineage: Digest of the base from which the federation started.

        Raises:
            GymError: ``BASE_MISMATCH`` for a state of another lineage, ``STATE_CORRUPT`` for a broken one.
        """
        file = ErrorFeedback.load(path, lineage)
        return cls({name: tensor for name in file.names() if (tensor := file.residual(name)) is not None})

    @property
    def step(self) -> int:
        """Number of this round, from 1."""
        return int(self._held[_STEP][0]) + 1 if _STEP in self._held else 1

    def update(self, moment: str, name: str, like: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """``change`` a tensor's moment, keep the result for the next round, and return it."""
        key = f"{moment}/{name}"
        held = self._held.get(key)
        self._next[key] = change(torch.zeros_like(like) if held is None else held)
        return self._next[key]

    def advance(self) -> None:
        """The round is over: what it made is what the next one begins from."""
        self._held, self._next = self._after(), {}

    def stage(self, path: str | Path, lineage: str) -> None:
        """Write what this round leaves, durably."""
        file = ErrorFeedback(Path(path), lineage, {})
        for name, tensor in self._after().items():
            file.record(name, tensor)
        file.stage(path)

    def _after(self) -> dict[str, Tensor]:
        return {**self._held, **self._next, _STEP: torch.tensor([float(self.step)])}


class ServerOptimizer(Rule):
    """One optimiser. To add one, put a file with a subclass into ``gym_fed/soup/optimizers``, named like it."""

    @abstractmethod
    def step(self, name: str, aggregate: Tensor, state: OptimizerState) -> Tensor:
        """The step for one tensor, before the server's learning rate: float32 in the aggregate's shape."""
