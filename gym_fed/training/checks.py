"""Everything a config is held against before a model is loaded: algorithm, tuning, optimiser, machine."""

from __future__ import annotations

from gym_fed.config.training import TrainingConfig
from gym_fed.models import pick_device


def check_config(config: TrainingConfig) -> None:
    """Refuse what this machine or installation cannot honour; nothing is silently left out or replaced.

    Raises:
        GymError: ``CONFIG_INVALID``, ``MISSING_DEPENDENCY`` or ``USAGE`` naming the key and the remedy.
    """
    from gym_fed.training.algorithms import get_algorithm
    from gym_fed.training.optimizers import get_optimizer
    from gym_fed.training.tuning import get_tuning

    pick_device(config.device)
    get_algorithm(config.algorithm).check(config)
    get_tuning(config.finetuning).check(config)
    get_optimizer(config.optimizer).check(config)
