"""With this folder on PYTHONPATH a Python finds no module of the packages in ``GYM_TESTS_WITHOUT``."""

from __future__ import annotations

import os
from importlib.machinery import PathFinder
from typing import Any

_LEFT_OUT = frozenset(os.environ.get("GYM_TESTS_WITHOUT", "").split(","))
_find_spec = PathFinder.find_spec


def _find_other(name: str, *rest: Any, **more: Any) -> Any:
    return None if name.partition(".")[0] in _LEFT_OUT else _find_spec(name, *rest, **more)


PathFinder.find_spec = staticmethod(_find_other)  # type: ignore[method-assign,assignment]
