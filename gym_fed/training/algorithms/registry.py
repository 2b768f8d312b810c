"""Finds algorithms by file name; listing them imports nothing heavy.

To add one, drop ``NAME.py`` into this folder with one subclass of ``Algorithm`` (``base.py``) in it.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_fed.training.algorithms.base import Algorithm

_NOT_ALGORITHMS = {"base", "registry"}


def algorithm_names() -> list[str]:
    """Every registered algorithm, in alphabetical order."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(m.name for m in modules if m.name not in _NOT_ALGORITHMS and not m.name.startswith("_"))


def get_algorithm(name: str) -> Algorithm:
    """The algorithm in ``NAME.py``.

    Raises:
        GymError: ``CONFIG_INVALID`` when there is none.
    """
    from gym_fed.training.algorithms.base import Algorithm

    if name not in algorithm_names():
        known = ", ".join(algorithm_names())
        raise GymError(ErrorCode.CONFIG_INVALID, f"algorithm: {name!r} is unknown", f"one of {known}")
    module = importlib.import_module(f"gym_fed.training.algorithms.{name}")
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Algorithm) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        raise TypeError(f"{module.__file__} must hold exactly one Algorithm, found {len(found)}")
    return found[0]()
