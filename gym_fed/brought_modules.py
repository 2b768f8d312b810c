"""Finds modules that other platforms have under a name of their own, when there is none of that name here.

``import gym_fed.train`` tries every other finder first. The table of the names is imported only then.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from gym_fed.other_words import MISSING, attribute, look_up_in

_PACKAGE = "gym_fed."


class _Found(Loader):
    """Gives the module that stands for a name."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It has run already, under its own name."""
        module.__spec__ = self._spec


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(_PACKAGE) or name.startswith(f"{_PACKAGE}compat"):
            return None
        owner, _, last = name.rpartition(".")
        found = attribute(owner, last)
        if found is MISSING or not isinstance(found, ModuleType):
            return None
        return ModuleSpec(name, _Found(found))


look_up_in("gym_fed.compat.words")
if not any(type(finder).__name__ == _Finder.__name__ for finder in sys.meta_path):
    sys.meta_path.append(_Finder())
