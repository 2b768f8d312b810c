"""gym-fed: a community improves one language model together, and trains on one machine too.

The public names are imported on first use, so that ``import gym_fed`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gym_fed import flower_env as _flower_env  # sets Flower's variables before anything imports flwr

__version__ = "0.2.0.dev0"

_LAZY = {
    "Experiment": "gym_fed.tracking",
    "GymError": "gym_fed.errors",
    "Trainer": "gym_fed.training",
    "TrainingConfig": "gym_fed.config",
}
del _flower_env
__all__ = ["Experiment", "GymError", "Trainer", "TrainingConfig", "__version__"]

if TYPE_CHECKING:
    from gym_fed.config import TrainingConfig
    from gym_fed.errors import GymError
    from gym_fed.tracking import Experiment
    from gym_fed.training import Trainer


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gym_fed' has no attribute {name!r}")
