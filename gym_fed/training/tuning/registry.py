"""Finds tuning methods by file name; to add one, drop ``NAME.py`` with one subclass of ``Tuning`` into this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.training.registry import Registry

if TYPE_CHECKING:
    from gym_fed.training.tuning.base import Tuning

_METHODS: Registry[Tuning] = Registry("gym_fed.training.tuning", "finetuning")


def tuning_names() -> list[str]:
    """Every registered method, in alphabetical order."""
    return _METHODS.names()


def get_tuning(name: str) -> Tuning:
    """The method in ``NAME.py``.

    Raises:
        GymError: ``CONFIG_INVALID`` when there is none.
    """
    from gym_fed.training.tuning.base import Tuning

    return _METHODS.get(name, Tuning)
