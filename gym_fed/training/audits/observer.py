"""Define the base class of observers, which see every batch of a run and fix the random state of each step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from gym_fed.training.audits.states import batch_digest


class StepObserver(TrainerCallback):
    """Observes the batches of a run, and makes the random numbers of a step depend only on seed and step number.

    An auditor who skips earlier steps therefore draws the same random numbers.
    """

    def __init__(self) -> None:
        self._batches: list[Any] = []

    def attach(self, trainer: Any) -> None:
        """Observe a transformers trainer; must be called once, before training."""
        compute = trainer.training_step

        def training_step(model: Any, inputs: Any, *args: Any, **named: Any) -> Tensor:
            step = int(trainer.state.global_step) + 1
            self._batches.append({name: value for name, value in inputs.items() if isinstance(value, Tensor)})
            if not self.computes(step):
                zero: Tensor = next(model.parameters()).new_zeros(())
                return zero
            loss: Tensor = compute(model, inputs, *args, **named)
            return loss

        trainer.training_step = training_step
        trainer.add_callback(self)

    def computes(self, step: int) -> bool:
        """Return True if the gradients of the step are needed; other steps do not change the weights."""
        return True

    def take_batch_digest(self) -> str:
        """Return the digest of the batches since the last call."""
        digest = batch_digest(self._batches)
        self._batches = []
        return digest

    def fix_randomness(self, args: Any, state: Any) -> None:
        """Seed torch's generators for the step after ``state.global_step``."""
        torch.manual_seed(args.seed + state.global_step)
