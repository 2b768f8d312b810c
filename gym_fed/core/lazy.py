"""Names and modules that are imported on first use, so that a command that needs no torch never loads it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from gym_fed.core.aliases import MISSING, attribute


def lazy(package: str) -> tuple[list[str], Callable[[str], Any]]:
    """``__all__`` and ``__getattr__`` (PEP 562) of a package: the names that it imports for type checkers.

    So each name stands once, under ``if TYPE_CHECKING:``, as ``from module import name as name``.
    """
    spec = importlib.util.find_spec(package)
    source = spec.loader.get_source(package)  # type: ignore[union-attr]
    checked = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    sources = {
        alias.name: statement.module
        for statement in checked.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }

    def __getattr__(name: str) -> Any:
        if name in sources:
            return getattr(importlib.import_module(str(sources[name])), name)
        if not name.startswith("_") and (value := attribute(package, name)) is not MISSING:
            return value
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return sorted(sources), __getattr__


class _LazyModule(ModuleType):
    """A module that is imported when an attribute of it is first read."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy_module(name: str) -> Any:
    """Stands for a module, and imports it when an attribute of it is first read.

    Args:
        name: The whole dotted name. The module that is in ``sys.modules`` under it is always the real one.
    """
    return _LazyModule(name)
