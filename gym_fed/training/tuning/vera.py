"""VeRA: every layer shares two frozen random factors and learns a vector beside each.

Kopiczko et al. 2023, "VeRA: Vector-based Random Matrix Adaptation".
"""

from __future__ import annotations

from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.training.tuning.base import Tuning


class Vera(Tuning):
    """``W x + diag(b) B diag(d) A x``; A and B follow from ``seed``."""

    tried = "learns, saved, resumed to the bit"

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        from peft import VeraConfig

        from gym_fed.training.tuning._peft import task_type, wrap_for

        settings = config.vera
        assert settings is not None  # filled in by the config
        wanted = VeraConfig(
            task_type=task_type(config),
            r=settings.r,
            d_initial=settings.d_initial,
            vera_dropout=settings.vera_dropout,
            save_projection=settings.save_projection,
            projection_prng_key=config.seed,
            target_modules=settings.target_modules,
            modules_to_save=settings.modules_to_save or None,
        )
        return wrap_for(model, wanted, config)
