"""gym-fed: a community improves one language model together, and trains on one machine too.

The public names are imported on first use, so that ``import gym_fed`` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.core import library_env as _flower_env
from gym_fed.core.lazy import lazy
from gym_fed.version import __version__ as __version__

if TYPE_CHECKING:
    from gym_fed.config.train.training import TrainingConfig as TrainingConfig
    from gym_fed.core.errors import GymError as GymError
    from gym_fed.tracking.experiment import Experiment as Experiment
    from gym_fed.training.trainer import Trainer as Trainer

del _flower_env
__all__, __getattr__ = lazy(__name__)
__all__ += ["__version__"]
