"""Finds optimisers: by file name, or in the table of those that are a class of some library.

To add one, give its class in ``_table.py``, or drop ``NAME.py`` with one subclass of ``OptimizerChoice`` in here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.errors import ErrorCode, GymError
from gym_fed.training.registry import Registry

if TYPE_CHECKING:
    from gym_fed.training.optimizers.base import OptimizerChoice

_OPTIMIZERS: Registry[OptimizerChoice] = Registry("gym_fed.training.optimizers", "optimizer")


def optimizer_names() -> list[str]:
    """Every registered optimiser, in alphabetical order."""
    from gym_fed.training.optimizers._table import TABLE

    return sorted([*_OPTIMIZERS.names(), *TABLE])


def get_optimizer(name: str) -> OptimizerChoice:
    """The optimiser of that name.

    Raises:
        GymError: ``CONFIG_INVALID`` when there is none.
    """
    from gym_fed.training.optimizers._table import TABLE
    from gym_fed.training.optimizers.base import OptimizerChoice

    if name in TABLE:
        return TABLE[name]
    if name not in _OPTIMIZERS.names():
        known = ", ".join(optimizer_names())
        raise GymError(ErrorCode.CONFIG_INVALID, f"optimizer: {name!r} is unknown", f"one of {known}")
    return _OPTIMIZERS.get(name, OptimizerChoice)
