"""Server optimisers: the server's step from a round's aggregate to its soup.

Reddi et al. 2021, "Adaptive Federated Optimization", alg. 2: the aggregated delta is treated as a (negative) gradient,
along which an ordinary optimiser steps. The formulas are those of Flower's FedAvgM, FedAdam and FedYogi; the tests
compare the results.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_json
from gym_fed.core.lazy import torch
from gym_fed.soup.rule import Rule

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("gym_fed")

_STEP = "step"
_RULE = "rule/"
"""Prefix of the entry whose name contains the rule that the moments belong to."""


class OptimizerState:
    """The float32 moments of each tensor, after the last round and in the current one."""

    def __init__(self, held: Mapping[str, Tensor] | None = None, rule: str = "") -> None:
        """Start with the moments in ``held``, if any; ``rule`` is the optimiser that they belong to."""
        self._held = dict(held or {})
        self._rule = rule
        self._next: dict[str, Tensor] = {}

    @classmethod
    def load(cls, path: str | Path, lineage: str, rule: str) -> OptimizerState:
        """Read a staged state; all moments are zero if there is no file, or if it belongs to a different rule.

        Args:
            path: The file.
            lineage: Digest of the federation's first base.
            rule: ``ServerOptimizer.rule`` of the optimiser that will use the state.

        Raises:
            GymError: ``BASE_MISMATCH`` for a state of a different lineage, ``STATE_CORRUPT`` for a damaged one.
        """
        from gym_fed.delta.feedback import ErrorFeedback

        file = ErrorFeedback.load(path, lineage)
        held = {name: tensor for name in file.names() if (tensor := file.residual(name)) is not None}
        made_by = {name.removeprefix(_RULE) for name in held if name.startswith(_RULE)}
        if held and made_by != {rule}:
            owners = ", ".join(sorted(made_by)) or "an unnamed optimiser"
            log.warning("%s contains the moments of %s; %s starts from zero", path, owners, rule)
            held = {}
        return cls({name: tensor for name, tensor in held.items() if not name.startswith(_RULE)}, rule)

    @property
    def step(self) -> int:
        """Number of the round, from 1."""
        return int(self._held[_STEP][0]) + 1 if _STEP in self._held else 1

    def tensors(self) -> tuple[str, ...]:
        """Return the sorted names of the tensors with a moment from earlier rounds."""
        return tuple(sorted({key.split("/", 1)[1] for key in self._held if key != _STEP}))

    def update(self, moment: str, name: str, like: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``change`` to a tensor's moment, store the result for the next round, and return it.

        Raises:
            GymError: ``UPDATE_REFUSED`` if it overflows float32, since no later round could start from it.
        """
        key = f"{moment}/{name}"
        held = self._held.get(key)
        changed = change(torch.zeros_like(like) if held is None else held)
        if not bool(torch.isfinite(changed).all()):
            raise GymError(
                ErrorCode.UPDATE_REFUSED,
                f"tensor {name!r}: the server optimiser's moment {moment!r} overflows float32",
                "the square of the aggregate overflows; limit updates with max_norm",
            )
        self._next[key] = changed
        return changed

    def advance(self) -> None:
        """End the round: its moments become those of the next one."""
        self._held, self._next = self._after(), {}

    def stage(self, path: str | Path, lineage: str) -> None:
        """Write this round's moments durably."""
        from gym_fed.delta.feedback import ErrorFeedback

        file = ErrorFeedback(Path(path), lineage, {})
        for name, tensor in self._after().items():
            file.record(name, tensor)
        file.record(_RULE + self._rule, torch.ones(1))
        file.stage(path)

    def _after(self) -> dict[str, Tensor]:
        return {**self._held, **self._next, _STEP: torch.tensor([float(self.step)])}


class ServerOptimizer(Rule):
    """A server optimiser. To add one, put a file with a subclass into ``gym_fed/soup/optimizers``, named like it."""

    @property
    def rule(self) -> str:
        """Name and settings; moments of a different rule are not reused."""
        return f"{self.name} {canonical_json(self.config.model_dump(mode='json')).decode('utf-8')}"

    @abstractmethod
    def step(self, name: str, aggregate: Tensor, state: OptimizerState) -> Tensor:
        """Compute the step for one tensor, before the server's learning rate: float32 in the aggregate's shape."""
