"""Callbacks for every step of a run, which log metrics, report progress, and handle stop requests and spikes."""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from transformers import TrainerCallback

from gym_fed.core.errors import ErrorCode
from gym_fed.data.row_counts import RowCounts
from gym_fed.tracking.experiment import Experiment
from gym_fed.training.run.reproducibility import random_state_restorer
from gym_fed.training.run.spikes import Diverged, Spike, SpikeWatch

OnStep = Callable[[int, int, float], None]
ShouldStop = Callable[[], bool]
Track = Callable[[int], Experiment]

_LAST_VALUE = ("learning_rate", "grad_norm", "epoch", "epsilon")
_OWN = {"step", "loss", "num_tokens", "tokens_so_far", *_LAST_VALUE}
_TIMED = re.compile(r"(^|[_/])(runtime|step_time|time|(tokens|samples|steps)_per_second)(/|$)")


class KeptRandomState(TrainerCallback):
    """Restores the random state after an evaluation before the first step, so that the run does not change."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._restore = random_state_restorer()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self._restore()


@dataclass(frozen=True)
class StepReport:
    """The metrics after a step or an evaluation.

    Attributes:
        step: Step number, starting from 1.
        total: Number of steps of the run.
        loss: Mean loss over the step's rows; near 0 for algorithms that learn from rewards.
        reward: Mean reward; None if the algorithm does not log it.
        num_tokens: Number of tokens seen so far; 0 if the algorithm does not count them.
        tokens_per_second: Throughput since this process started; None if tokens are not counted.
        seconds_left: Estimated remaining time, from the speed of this process.
        memory_bytes: Peak memory of the process so far, on the GPU if there is one, otherwise in RAM.
        evaluation: Metrics on ``eval_data`` (``eval_loss``, ...) if the report is about an evaluation.
        epsilon: Upper bound on the privacy cost so far, under ``privacy``.
    """

    step: int
    total: int
    loss: float
    reward: float | None
    num_tokens: int
    tokens_per_second: float | None
    seconds_left: float | None
    memory_bytes: int
    evaluation: dict[str, float] | None = None
    epsilon: float | None = None


OnReport = Callable[[StepReport], None]
OnRows = Callable[[str, RowCounts], None]
"""Called with ``data``, ``eval_data``, or ``pipeline`` for a data pipeline, and the row counts."""


class RunHooks(TrainerCallback):
    """The callback of every trainer. ``losses[i]`` is the mean loss of step ``i + 1``, also after a resume.

    Args:
        track: Opens the tracked run at the step to resume from.
        interval: Maps the number of steps of the run to the number of steps between tracked metrics.
        on_step: Called with ``(step, total, loss)`` after every step.
        on_report: Called with a report after every step and every evaluation; may raise to end the run.
        should_stop: Called after every step; True stops the run.
        watch: Detector of loss spikes; a spike stops the loop and is stored in ``spike``.
    """

    def __init__(
        self,
        track: Track,
        interval: Callable[[int], int],
        on_step: OnStep | None = None,
        on_report: OnReport | None = None,
        should_stop: ShouldStop | None = None,
        watch: SpikeWatch | None = None,
    ) -> None:
        self.losses: list[float] = []
        self.num_tokens = 0
        self.stopped = False
        self.spike: Spike | None = None
        self.experiment: Experiment | None = None
        self._track = track
        self._interval = interval
        self._on_step = on_step
        self._on_report = on_report
        self._should_stop = should_stop
        self._watch = watch
        self._raw_tokens = 0
        self._last_report: StepReport | None = None

    def close(self) -> None:
        """Close the tracked run."""
        if self.experiment is not None:
            self.experiment.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Restore the log of a resumed run, and drop the metrics of steps that will be repeated."""
        history = [entry for entry in state.log_history if "loss" in entry]
        self.losses = [float(entry["loss"]) for entry in history]
        self.num_tokens = int(history[-1]["tokens_so_far"]) if history else 0
        # After a rollback, the trainer's own count continues.
        self._tokens_before = self.num_tokens - self._raw_tokens
        self._began = self._wrote = time.monotonic()
        self._step_began = state.global_step
        self._tokens_began = self._tokens_wrote = self.num_tokens
        self.spike = None
        self.close()
        self.experiment = self._track(state.global_step)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Handle the log entry of an optimiser step (``logs`` contains its loss) or of an evaluation."""
        if logs is None:
            return
        if "loss" in logs:
            self._step_done(state, control, logs)
        elif any(key.startswith("eval_") for key in logs):
            self._evaluated(state, logs)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Skip the evaluation at the end of an epoch if the run is being stopped."""
        if self.stopped or self.spike is not None:
            control.should_evaluate = control.should_log = control.should_save = False

    def _step_done(self, state: Any, control: Any, logs: dict[str, Any]) -> None:
        step, loss = state.global_step, float(logs["loss"])
        if self._is_spike(state, loss, logs):
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False  # these are read after logging
            return
        if not math.isfinite(loss):
            reason = f"the loss is {loss} at step {step}: training has diverged"
            remedy = "lower learning_rate, or set max_grad_norm or loss_spikes"
            raise Diverged(ErrorCode.DATA_INVALID, reason, remedy)
        self.losses.append(loss)
        self._raw_tokens = int(logs.get("num_tokens", 0))
        self.num_tokens = self._tokens_before + self._raw_tokens
        # Stored in the trainer's history, which checkpoints contain.
        state.log_history[-1]["tokens_so_far"] = self.num_tokens
        if step in (1, state.max_steps) or step % self._interval(state.max_steps) == 0:
            self._write(state)
        if self._on_step is not None:
            self._on_step(step, state.max_steps, loss)
        self._report(state, loss, logs)
        if self._should_stop is not None and self._should_stop() and step < state.max_steps:
            self.stopped = True
            control.should_training_stop = True
            control.should_save = True  # read after logging

    def _is_spike(self, state: Any, loss: float, logs: dict[str, Any]) -> bool:
        """Return True if the loop must roll back."""
        if self._watch is None:
            return False
        norms = [float(e["grad_norm"]) for e in state.log_history[:-1] if "loss" in e and "grad_norm" in e]
        spike = self._watch.check(state.global_step, loss, self.losses, logs.get("grad_norm"), norms)
        if spike is None or not self._watch.settings.rollback:
            return False
        self.spike = spike
        return True

    def _evaluated(self, state: Any, logs: dict[str, Any]) -> None:
        figures = _figures(logs)
        figures.pop("eval_num_tokens", None)  # the trainer's own count, which a resume resets
        figures["num_tokens"] = self.num_tokens
        assert self.experiment is not None
        self.experiment.log_metrics(figures, state.global_step)
        if self._on_report is not None and self._last_report is not None:
            metrics = {key: value for key, value in figures.items() if not key.startswith("performance/")}
            self._on_report(replace(self._last_report, evaluation=metrics))

    def _report(self, state: Any, loss: float, logs: dict[str, Any]) -> None:
        if self._on_report is None:
            return
        seconds = time.monotonic() - self._began
        steps, tokens = state.global_step - self._step_began, self.num_tokens - self._tokens_began
        reward = logs.get("reward", logs.get("rewards/chosen"))
        self._last_report = StepReport(
            step=state.global_step,
            total=state.max_steps,
            loss=loss,
            reward=None if reward is None else float(reward),
            num_tokens=self.num_tokens,
            tokens_per_second=tokens / seconds if tokens and seconds else None,
            seconds_left=seconds / steps * (state.max_steps - state.global_step) if steps else None,
            memory_bytes=peak_memory_bytes(),
            epsilon=logs.get("epsilon"),
        )
        self._on_report(self._last_report)

    def _write(self, state: Any) -> None:
        """Write the means over the steps since the last line, and the last value of keys such as ``learning_rate``.

        Which steps are averaged depends only on the step number, so a resumed run writes the same lines.
        """
        step, interval = state.global_step, self._interval(state.max_steps)
        count = step - max((step - 1) // interval * interval, int(step > 1))
        entries = [entry for entry in state.log_history if "loss" in entry][-count:]
        names = dict.fromkeys(key for entry in entries for key in _figures(entry) if key not in _OWN)
        figures: dict[str, float] = {"loss": sum(self.losses[-count:]) / count}
        figures.update({key: entries[-1][key] for key in _LAST_VALUE if entries[-1].get(key) is not None})
        figures["num_tokens"] = self.num_tokens
        for name in names:
            values = [numbers[name] for numbers in map(_figures, entries) if name in numbers]
            figures[name] = sum(values) / len(values)
        now = time.monotonic()
        seconds = max(now - self._wrote, 1e-9)
        figures["performance/seconds"] = seconds
        figures["performance/tokens_per_second"] = (self.num_tokens - self._tokens_wrote) / seconds
        figures["performance/peak_ram_bytes"] = peak_ram_bytes()
        cuda = peak_cuda_bytes()
        if cuda is not None:
            figures["performance/peak_cuda_bytes"] = cuda
        busy = gpu_utilization()
        if busy is not None:
            figures["performance/gpu_utilization_percent"] = busy
        self._wrote, self._tokens_wrote = now, self.num_tokens
        assert self.experiment is not None
        self.experiment.log_metrics(figures, state.global_step)


def peak_ram_bytes() -> int:
    """Return the peak RAM of this process."""
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_cuda_bytes() -> int | None:
    """Return the peak memory of tensors on the current GPU; None without a GPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def gpu_utilization() -> float | None:
    """Return the percentage of the last second in which the current GPU was running a kernel.

    None without a GPU, without the extra ``gpu`` (``nvidia-ml-py``), or for a MIG instance, which does not report it.
    """
    if not torch.cuda.is_available() or find_spec("pynvml") is None:
        return None
    from pynvml import NVMLError

    try:
        return float(torch.cuda.utilization())
    except NVMLError:
        return None


def peak_memory_bytes() -> int:
    """Return the peak memory of the GPU, or of RAM if there is no GPU."""
    return peak_cuda_bytes() or peak_ram_bytes()


def _figures(logs: dict[str, Any]) -> dict[str, float]:
    """Return the numbers in a log entry; durations get the prefix ``performance/``."""
    return {
        f"performance/{key}" if _TIMED.search(key) else key: value
        for key, value in logs.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
