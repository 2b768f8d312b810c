"""Datasets: formats, the generated text tasks, and what a trainer sees. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_LAZY = {
    "load_rows": "gym_fed.data.formats",
    "generate": "gym_fed.data.tasks",
    "generate_mix": "gym_fed.data.tasks",
    "encode_rows": "gym_fed.data.encoding",
}
__all__ = ["encode_rows", "generate", "generate_mix", "load_rows"]

if TYPE_CHECKING:
    from gym_fed.data.encoding import encode_rows
    from gym_fed.data.formats import load_rows
    from gym_fed.data.tasks import generate, generate_mix


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'gym_fed.data' has no attribute {name!r}")
