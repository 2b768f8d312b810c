"""Entry points as an installed package would have them, for one test."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import gym_quant.registry
import pytest


def install(monkeypatch: pytest.MonkeyPatch, points: Mapping[str, Mapping[str, str]]) -> None:
    """Let ``points``, ``{group: {name: "module:Class"}}``, be those of the package ``gym-more`` 1.2."""
    whose: Any = SimpleNamespace(name="gym-more", version="1.2")

    def installed(group: str) -> tuple[EntryPoint, ...]:
        points_of: Any = [EntryPoint(n, v, group) for n, v in points.get(group, {}).items()]
        return tuple(point._for(whose) for point in points_of)

    monkeypatch.setattr(gym_quant.registry, "_installed", installed)
