"""``example_sft``: supervised fine-tuning whose loss counts ``factor`` times."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.training.algorithms.sft import Sft


class Factor(StrictModel):
    """The section ``example_sft``."""

    factor: float = Field(default=1.0, gt=0)


class ExampleSft(Sft):
    Settings = Factor

    def build(self, job: Any) -> Any:
        trainer, factor = super().build(job), job.config.example_sft.factor
        plain = trainer.compute_loss

        def counted(*args: Any, **named: Any) -> Any:
            found = plain(*args, **named)
            return (factor * found[0], *found[1:]) if isinstance(found, tuple) else factor * found

        trainer.compute_loss = counted
        return trainer
