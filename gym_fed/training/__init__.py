"""The standalone trainer and its algorithms, one file each, in one registry. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "TrainResult": "gym_fed.training.trainer",
    "Trainer": "gym_fed.training.trainer",
    "TrainingConfig": "gym_fed.config.training",
    "lora_factors": "gym_fed.training.lora",
}
__all__ = ["TrainResult", "Trainer", "TrainingConfig", "lora_factors"]

if TYPE_CHECKING:
    from gym_fed.config.training import TrainingConfig
    from gym_fed.training.lora import lora_factors
    from gym_fed.training.trainer import Trainer, TrainResult


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gym_fed.training' has no attribute {name!r}")
