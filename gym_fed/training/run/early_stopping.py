"""Stop early, by the loss on held-out rows, and restore the weights of the best evaluation.

All decisions depend only on the trainer's log, which checkpoints contain, so a resumed run stops at the same step.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from gym_fed.config.train.run import EarlyStopping
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.training.processes import group as processes


def check_early_stopping(config: TrainingConfig, *, has_eval_data: bool) -> None:
    """Refuse evaluation settings without rows to evaluate on."""
    stopping, strategy = config.early_stopping, config.distributed_strategy
    sharded = processes.world_size() > 1 and config.splits_state
    refuse_first(
        (
            stopping is not None and stopping.restore_best and sharded,
            f"early_stopping.restore_best: with {strategy}, no process has all weights",
            "set restore_best: false, or distributed.strategy: ddp",
        )
    )
    for key in ("early_stopping", "eval_steps", "eval_strategy"):
        is_idle = not has_eval_data and getattr(config, key) not in (None, 0, "no")
        reason = f"{key}: there are no held-out rows to evaluate on"
        refuse_first((is_idle, reason, "add eval_data, or remove the key"))


class EarlyStop(TrainerCallback):
    """Stops the run after ``patience`` consecutive evaluations without improvement.

    Args:
        settings: Settings such as metric and patience.
        model: Model whose trainable weights are saved after every improvement.
        folder: The run folder; the weights are saved to ``best/step-N.safetensors``.
    """

    def __init__(self, settings: EarlyStopping, model: Any, folder: Path) -> None:
        self._settings = settings
        self._model = model
        self._folder = folder / "best"
        self.ended = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Reset the state at the start of training."""
        self.ended = False

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Save the weights after an improvement; stop after too many evaluations without one."""
        if self._settings.metric not in (metrics or {}):
            known = ", ".join(sorted(metrics or {}))
            reason = f"early_stopping.metric: evaluation does not report {self._settings.metric!r}"
            raise GymError(ErrorCode.CONFIG_INVALID, reason, f"one of {known}")
        if self.best_step(state) == state.global_step and self._settings.restore_best:
            self._keep(state.global_step)
        if self.is_over(state):
            control.should_training_stop = True
            self.ended = True

    def is_over(self, state: Any) -> bool:
        """Return True if ``patience`` evaluations have passed since the best one."""
        steps = [step for step, _ in self._history(state)]
        best = self.best_step(state)
        return best is not None and sum(step > best for step in steps) >= self._settings.patience

    def best_step(self, state: Any) -> int | None:
        """Return the step of the best evaluation: the first that no later one beats by more than ``min_delta``."""
        best: tuple[int, float] | None = None
        for step, value in self._history(state):
            if best is None or value < best[1] - self._settings.min_delta:
                best = step, value
        return None if best is None else best[0]

    def restore(self, state: Any) -> int | None:
        """Load the weights of the best evaluation into the model.

        Returns:
            The step of that evaluation; None if there was none, or without ``restore_best``.

        Raises:
            GymError: ``STATE_CORRUPT`` if the file with the weights is missing or damaged.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        best = self.best_step(state)
        if best is None or not self._settings.restore_best:
            return None
        file = self._file(best)
        try:
            weights = load_file(str(file))
        except (OSError, SafetensorError) as error:
            reason = f"{file}: the weights of the best evaluation cannot be read: {error}"
            remedy = "restore the file, or pass --overwrite to delete the run and start again"
            raise GymError(ErrorCode.STATE_CORRUPT, reason, remedy) from error
        for name, weight in self._trained():
            weight.data.copy_(weights[name])
        return best

    def _history(self, state: Any) -> list[tuple[int, float]]:
        """Return ``(step, value)`` of every evaluation; a metric to maximise is negated."""
        sign = 1 if self._settings.direction == "minimize" else -1
        metric = self._settings.metric
        figures = [(e["step"], sign * float(e[metric])) for e in state.log_history if metric in e]
        # NaN is treated as infinity, since no value compares as less than NaN.
        return [(step, value if math.isfinite(value) else math.inf) for step, value in figures]

    def _keep(self, step: int) -> None:
        """Save the weights, keeping the previous file, since a resume or rollback may start before this step."""
        from safetensors.torch import save_file

        if not processes.is_main():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        older = sorted(
            (int(f.stem.removeprefix("step-")), f) for f in self._folder.glob("step-*.safetensors")
        )
        partial = self._folder / "partial.safetensors"
        save_file({name: weight.detach().contiguous().cpu() for name, weight in self._trained()}, partial)
        partial.replace(self._file(step))
        for _, file in [entry for entry in older if entry[0] < step][:-1]:
            file.unlink()

    def _trained(self) -> list[tuple[str, Any]]:
        return [(name, weight) for name, weight in self._model.named_parameters() if weight.requires_grad]

    def _file(self, step: int) -> Path:
        return self._folder / f"step-{step}.safetensors"
