"""AdamW, Loshchilov and Hutter 2019; torch's, fused where the device has it."""

from __future__ import annotations

from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.training.optimizers.base import OptimizerChoice


class AdamW(OptimizerChoice):
    """What transformers takes by default."""

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        return {}
