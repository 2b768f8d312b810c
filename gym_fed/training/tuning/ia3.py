"""(IA)3: learn to rescale keys, values and the MLP's inner activations, element by element.

Liu et al. 2022, "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning".
"""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.tuning.base import Tuning


class Ia3(Tuning):
    """(IA)3: ``l * (W x)``, or ``W (l * x)`` for ``feedforward_modules``; l starts at one."""

    default_learning_rate = 0.003  # from the paper
    tried = "learning, saving, bit-exact resume"

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        from peft import IA3Config

        from gym_fed.training.model.peft_models import peft_arguments, wrap_for

        return wrap_for(model, IA3Config(**peft_arguments(config)), config)
