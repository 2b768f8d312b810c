"""The Python names that are meant to be imported: `gym docs api`."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

from gym_fed.cli.reference._markdown import cell

PACKAGES = (
    "gym_fed",
    "gym_fed.quickstart",
    "gym_fed.data",
    "gym_fed.evaluation",
    "gym_fed.quantization",
    "gym_fed.personalization",
    "gym_fed.registry",
    "gym_server.strategy",
)
"""Packages whose names are public; other names may change with any version."""

_INTRODUCTION = """\
# The Python names

These names are meant to be imported. Others may change with any version. A package loads nothing heavy before a name is
used. Examples: [recipes](recipes.md), [variants](variants.md), [evaluation](evaluation.md),
[quantisation](quantization.md), [the registry](registry.md).
"""


def page() -> str:
    """A table of names for each package, and below it the place of each for mkdocstrings."""
    parts = [_INTRODUCTION]
    for package in PACKAGES:
        module = importlib.import_module(package)
        names = public_names(module)
        rows = "".join(f"| `{name}` | {_summary(getattr(module, name))} |\n" for name in names)
        places = "".join(f"::: {package}.{name}\n\n" for name in names)
        parts.append(f"## `{package}`\n\n| name | is |\n|---|---|\n{rows}\n{places}")
    return "\n".join(parts)


def public_names(module: ModuleType) -> list[str]:
    """Functions and classes that a package offers, or that a module defines."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]
    return sorted(name for name in names if callable(getattr(module, name)))


def _summary(value: Any) -> str:
    return cell(" ".join((inspect.getdoc(value) or "").split("\n\n")[0].split()))
