"""Packages whose names are imported on first use, so that a command that needs no torch never loads it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any


def lazy(package: str, **sources: str) -> Callable[[str], Any]:
    """A module-level ``__getattr__`` (PEP 562): each keyword is a name, its value the submodule that has it.

    A submodule of the same name as what it holds would hide it once it is imported; so that is refused.
    """
    hidden = [name for name, source in sources.items() if source.rpartition(".")[2] == name]
    if hidden:
        raise ImportError(f"{package}: {hidden[0]!r} is also the name of a submodule; rename one")

    def __getattr__(name: str) -> Any:
        if name in sources:
            return getattr(importlib.import_module(sources[name]), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
