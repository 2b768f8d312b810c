"""The standalone trainer and its algorithms, one file each, in one registry. Names are imported on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.lazy import lazy
from gym_fed.library_env import settle

if TYPE_CHECKING:
    from gym_fed.config.training import TrainingConfig
    from gym_fed.training.recipe import RecipeContext
    from gym_fed.training.result import TrainResult
    from gym_fed.training.trainer import Trainer
    from gym_fed.training.tuning.lora import lora_factors

settle()  # before a module of this room imports a training library

__all__ = [
    "RecipeContext",
    "TrainResult",
    "Trainer",
    "TrainingConfig",
    "lora_factors",
]

__getattr__ = lazy(
    __name__,
    RecipeContext="gym_fed.training.recipe",
    TrainResult="gym_fed.training.result",
    Trainer="gym_fed.training.trainer",
    TrainingConfig="gym_fed.config.training",
    lora_factors="gym_fed.training.tuning.lora",
)
