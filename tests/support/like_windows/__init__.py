"""A Python on Linux without what Windows lacks; see ``sitecustomize.py``."""

from __future__ import annotations

from pathlib import Path

from tests.support.like_windows.lacking import FUNCTIONS, MODULES, SIGNALS

LIKE_WINDOWS = {"PYTHONPATH": str(Path(__file__).parent)}
"""Added to its environment, a Python and those that it starts lack it."""

__all__ = ["FUNCTIONS", "LIKE_WINDOWS", "MODULES", "SIGNALS"]
