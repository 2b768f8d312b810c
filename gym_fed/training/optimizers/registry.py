"""Finds optimisers by file name; to add one, drop ``NAME.py`` with one subclass of ``OptimizerChoice`` in here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.training.registry import Registry

if TYPE_CHECKING:
    from gym_fed.training.optimizers.base import OptimizerChoice

_OPTIMIZERS: Registry[OptimizerChoice] = Registry("gym_fed.training.optimizers", "optimizer")


def optimizer_names() -> list[str]:
    """Every registered optimiser, in alphabetical order."""
    return _OPTIMIZERS.names()


def get_optimizer(name: str) -> OptimizerChoice:
    """The optimiser of that name.

    Raises:
        GymError: ``CONFIG_INVALID`` when there is none.
    """
    from gym_fed.training.optimizers.base import OptimizerChoice

    return _OPTIMIZERS.get(name, OptimizerChoice)
