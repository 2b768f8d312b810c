"""Finds algorithms by file name.

To add one, drop ``NAME.py`` into this folder with one subclass of ``Algorithm`` (``base.py``) in it; settings of its
own go into a section of ``gym_fed/config/algorithms``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.training.registry import Registry

if TYPE_CHECKING:
    from gym_fed.training.algorithms.base import Algorithm

_ALGORITHMS: Registry[Algorithm] = Registry("gym_fed.training.algorithms", "algorithm")


def algorithm_names() -> list[str]:
    """Every registered algorithm, in alphabetical order."""
    return _ALGORITHMS.names()


def get_algorithm(name: str) -> Algorithm:
    """The algorithm in ``NAME.py``.

    Raises:
        GymError: ``CONFIG_INVALID`` when there is none.
    """
    from gym_fed.training.algorithms.base import Algorithm

    return _ALGORITHMS.get(name, Algorithm)
