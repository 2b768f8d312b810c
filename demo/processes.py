"""The demo's federation of real processes: all of them end with this one, whatever ends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from demo.end_together import end_together
from gym_fed import local_federation
from gym_fed.local_federation import Joiner

REPOSITORY = Path(__file__).resolve().parents[1]


def run_federation(
    folder: Path, joiners: Mapping[str, Joiner], on_round: Callable[[dict[str, Any]], None]
) -> float:
    """``gym_fed.local_federation.run_federation``, whose processes find this checkout and outlive nothing."""
    end_together()
    environment = {"PYTHONPATH": str(REPOSITORY)}
    return local_federation.run_federation(folder, joiners, on_round, environment=environment)
