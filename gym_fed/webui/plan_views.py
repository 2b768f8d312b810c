"""Plan runs for the ``train`` screen like `gym train --plan`, in a process that keeps torch loaded."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.training.defaults import with_defaults
from gym_fed.training.planning.plan import RunPlan, plan_run
from gym_fed.webui.train_check import read
from gym_fed.webui.workbench import plain

_SECONDS = 3.0
"""Seconds after which no further model is planned in one answer."""


class PlanViews:
    """Answers ``plan`` with the plan of a config text, and ``memory`` with the run's peak memory on other models.

    Args:
        folder: Working directory, to which data paths are relative.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request with the view it names.

        Raises:
            GymError: Errors in the text, its rows or its model.
        """
        config, _ = read(request["text"])
        if request["view"] == "memory":
            return self._memory(config, request["models"])
        answer: dict[str, Any] = plain(_plan(config).facts())
        return answer

    def _memory(self, config: TrainingConfig, models: list[str]) -> dict[str, Any]:
        """Return ``{model: {peak_bytes, available_bytes} | {problem}}`` for the first models, at least one."""
        until = time.monotonic() + _SECONDS
        planned: dict[str, dict[str, Any]] = {}
        for model in models:
            try:
                plan = _plan(config.model_copy(update={"model": model}), timed=False)
                planned[model] = {"peak_bytes": round(plan.memory.peak), "available_bytes": plan.available}
            except GymError as error:
                planned[model] = {"problem": error.message[:300]}
            if time.monotonic() > until:
                break
        return planned


def _plan(config: TrainingConfig, *, timed: bool = True) -> RunPlan:
    return plan_run(with_defaults(config), timed=timed)
