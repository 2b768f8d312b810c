"""Plan runs for the ``train`` screen like `gym train --plan`, in a process that keeps torch loaded."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

from gym_fed.base.models import pick_device
from gym_fed.config.train.defaults import ROW_KEYS
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.training.defaults import with_defaults
from gym_fed.training.planning.plan import BlockTiming, RunPlan, calibrate, plan_run, step_seconds
from gym_fed.webui.train_check import read
from gym_fed.webui.workbench import plain

_SECONDS = 3.0
"""Seconds after which no further model is planned in one answer."""
_MAX_TIMINGS = 32
_UNTIMED_KEYS = {"output_dir", "max_steps", "num_train_epochs", "data", "eval_split", "learning_rate", "seed"}
"""Keys that do not change the time per token."""


class PlanViews:
    """Answers ``plan`` with the plan of a config text, and ``memory`` with the run's peak memory on other models.

    Args:
        folder: Working directory, to which data paths are relative.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._timings: dict[str, BlockTiming | None] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request with the view it names.

        Raises:
            GymError: Errors in the text, its rows or its model.
        """
        config, _ = read(request["text"])
        if request["view"] == "memory":
            return self._memory(config, request["models"])
        config = with_defaults(config)
        plan = plan_run(config, timed=False)
        if request["timed"] and plan.available is not None:
            plan = self._timed(config, plan)
        answer: dict[str, Any] = plain(plan.facts())
        return answer | {"by_rows": {key: getattr(config, key) for key in ROW_KEYS}}

    def _timed(self, config: TrainingConfig, plan: RunPlan) -> RunPlan:
        """Add the time of a step, measured once for all configs that differ in rows, length or folder only."""
        key = config.model_dump_json(exclude=_UNTIMED_KEYS)
        if key not in self._timings:
            if len(self._timings) == _MAX_TIMINGS:
                self._timings.clear()
            self._timings[key] = calibrate(config, plan.sizes, pick_device(config.device))
        measured = self._timings[key]
        seconds = None if measured is None else step_seconds(config, plan.sizes, measured)
        return dataclasses.replace(plan, seconds=seconds)

    def _memory(self, config: TrainingConfig, models: list[str]) -> dict[str, Any]:
        """Return ``{model: {peak_bytes, available_bytes} | {problem}}`` for the first models, at least one."""
        until = time.monotonic() + _SECONDS
        planned: dict[str, dict[str, Any]] = {}
        for model in models:
            try:
                plan = plan_run(with_defaults(config.model_copy(update={"model": model})), timed=False)
                planned[model] = {"peak_bytes": round(plan.memory.peak), "available_bytes": plan.available}
            except GymError as error:
                planned[model] = {"problem": error.message[:300]}
            if time.monotonic() > until:
                break
        return planned
