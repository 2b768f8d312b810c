"""(IA)3: keys, values and the MLP's inner activations are rescaled, element by element.

Liu et al. 2022, "Few-Shot Parameter-Efficient Fine-Tuning is Better and Cheaper than In-Context Learning".
"""

from __future__ import annotations

from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.training.tuning.base import Tuning


class Ia3(Tuning):
    """``l * (W x)``, or ``W (l * x)`` for ``feedforward_modules``; l starts at one."""

    tried = "learns, saved, resumed to the bit"

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        from peft import IA3Config

        from gym_fed.training.tuning._peft import task_type, wrap_for

        settings = config.ia3
        assert settings is not None  # filled in by the config
        wanted = IA3Config(
            task_type=task_type(config),
            target_modules=settings.target_modules,
            feedforward_modules=settings.feedforward_modules,
            modules_to_save=settings.modules_to_save or None,
        )
        return wrap_for(model, wanted, config)
