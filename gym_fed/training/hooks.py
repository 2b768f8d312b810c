"""What happens at every step of a run: losses are kept, metrics written, progress reported, stop requests heard."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gym_fed.errors import ErrorCode, GymError

OnStep = Callable[[int, int, float], None]
ShouldStop = Callable[[], bool]


class RunHooks(TrainerCallback):
    """Installed in every trainer. ``losses[i]`` is the mean loss of step ``i + 1``, across resumes too."""

    def __init__(
        self, metrics: Path, logging_steps: int, on_step: OnStep | None, should_stop: ShouldStop | None
    ) -> None:
        self.losses: list[float] = []
        self.num_tokens = 0
        self.stopped = False
        self._metrics = metrics
        self._logging_steps = logging_steps
        self._on_step = on_step
        self._should_stop = should_stop
        self._tokens_before = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take over what a resumed run has logged, and drop metrics of steps that will be repeated."""
        history = [entry for entry in state.log_history if "loss" in entry]
        self.losses = [float(entry["loss"]) for entry in history]
        self._tokens_before = self.num_tokens = int(history[-1]["tokens_so_far"]) if history else 0
        kept = []
        if self._metrics.exists():
            lines = self._metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [
                line
                for line in lines
                if line.endswith("\n") and json.loads(line)["step"] <= state.global_step
            ]
        self._metrics.write_text("".join(kept), encoding="utf-8")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """One optimiser step is done: ``logs`` holds its loss."""
        if logs is None or "loss" not in logs:
            return
        step, loss = state.global_step, float(logs["loss"])
        if not math.isfinite(loss):
            raise GymError(
                ErrorCode.DATA_INVALID,
                f"the loss is {loss} at step {step}: training has diverged",
                "lower learning_rate, or set max_grad_norm",
            )
        self.losses.append(loss)
        self.num_tokens = self._tokens_before + int(logs.get("num_tokens", 0))
        # Kept in the trainer's own history, so that a checkpoint carries it.
        state.log_history[-1]["tokens_so_far"] = self.num_tokens
        if step % self._logging_steps == 0 or step == state.max_steps:
            self._write(step, logs)
        if self._on_step is not None:
            self._on_step(step, state.max_steps, loss)
        if self._should_stop is not None and self._should_stop() and step < state.max_steps:
            self.stopped = True
            control.should_training_stop = True
            control.should_save = True  # looked at after logging

    def _write(self, step: int, logs: dict[str, Any]) -> None:
        window = self.losses[-(step % self._logging_steps or self._logging_steps) :]
        line = {
            "step": step,
            "loss": sum(window) / len(window),
            "learning_rate": logs.get("learning_rate"),
            "grad_norm": logs.get("grad_norm"),
            "epoch": logs.get("epoch"),
            "num_tokens": self.num_tokens,
        }
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
