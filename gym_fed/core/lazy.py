"""Import names and modules on first use, so that commands that do not need torch never load it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gym_fed.core.aliases import MISSING, attribute


def lazy(package: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return a package's ``__all__`` and ``__getattr__`` (PEP 562), derived from its imports for type checkers.

    Each name is written once, under ``if TYPE_CHECKING:``, as ``from module import name as name``.
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
    """A placeholder for a module that is imported on first attribute access."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def lazy_module(name: str) -> Any:
    """Return a placeholder that imports a module on first attribute access.

    Args:
        name: Full dotted name. ``sys.modules`` always contains the real module, never the placeholder.
    """
    return _LazyModule(name)


# Rules declare class attributes that a config check reads without importing torch.
if TYPE_CHECKING:
    import torch as torch
    from gym_quant import kernels as kernels
else:
    torch, kernels = lazy_module("torch"), lazy_module("gym_quant.kernels")
