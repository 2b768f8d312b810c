"""VeRA: layers share two frozen random factors, and each learns a vector per factor.

Kopiczko et al. 2023, "VeRA: Vector-based Random Matrix Adaptation".
"""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.tuning.base import Tuning


class Vera(Tuning):
    """VeRA: ``W x + diag(b) B diag(d) A x``; A and B are drawn from ``seed``."""

    default_learning_rate = 0.004  # from the paper
    tried = "learning, saving, bit-exact resume"

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        from peft import VeraConfig

        from gym_fed.training.model.peft_models import peft_arguments, wrap_for

        return wrap_for(model, VeraConfig(**peft_arguments(config), projection_prng_key=config.seed), config)
