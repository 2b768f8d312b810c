"""Train with DP-SGD in a loop that replaces transformers' and keeps its checkpoints, logs and evaluations.

A step draws a Poisson batch, sums clipped gradients in physical batches of ``per_device_train_batch_size``, adds noise
to the sum and divides it by the expected batch size. A batch may be empty; the step then consists only of noise, which
the accounting requires. The randomness of batches and noise comes from the operating system. A resumed run repeats
the steps since its last checkpoint with new draws; no saved weight depends on the earlier ones.

The initial weights may come from an attacker who wants to know whether a row is in the data. Therefore, only noisy
weights may end a run, and the treatment of a row does not depend on other rows: its padding depends only on its own
length.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from gym_fed.core.errors import ErrorCode
from gym_fed.data.encoding import IGNORED
from gym_fed.training.private.gradients import ClippedGradients, noisy_optimizer, require_exact
from gym_fed.training.private.plan import Plan, make_plan
from gym_fed.training.run.job import Job
from gym_fed.training.run.spikes import Diverged

_PAD_TO = 16
_WORD_BYTES = 8
_Trainer: Any = object  # typed as Any, since a mix-in uses attributes of its trainer


class DpSgd(_Trainer):  # type: ignore[misc]
    """A mix-in that makes a TRL trainer for supervised rows train with DP-SGD."""

    control: Any
    plan: Plan
    grad_sample_mode: str
    rows: list[dict[str, Any]]
    max_length: int

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        plan = self.plan
        epoch_steps = math.ceil(plan.num_examples / plan.expected_batch_size)
        epochs = math.ceil(plan.steps / epoch_steps)
        self._init_training_state(plan.steps, epoch_steps, epochs, resume_from_checkpoint, trial)
        model, _ = self._prepare_for_training(plan.steps, None, resume_from_checkpoint)
        started = time.time()
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._tr_loss, self._total_loss_scalar = torch.tensor(0.0), 0.0
        model.zero_grad()
        self.control = self.callback_handler.on_train_begin(args, self.state, self.control)
        gradients = ClippedGradients(model, self.grad_sample_mode, plan.max_grad_norm)
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # the trainer restores the filters
        try:
            require_exact(gradients)
            optimizer = noisy_optimizer(
                self.optimizer,
                self.grad_sample_mode,
                noise_multiplier=plan.noise_multiplier,
                max_grad_norm=plan.max_grad_norm,
                expected_batch_size=plan.expected_batch_size,
            )
            loss = 0.0
            while self.state.global_step < plan.steps and not self.control.should_training_stop:
                loss = self._step(model, gradients, optimizer, loss)
                self._after_step(loss, epoch_steps, trial, ignore_keys_for_eval, started)
        finally:
            gradients.close()
        return self._finalize_training(trial, plan.steps * plan.expected_batch_size, started)

    def _step(self, model: Any, gradients: ClippedGradients, optimizer: Any, loss: float) -> float:
        """Run one step. Return the mean of its finite losses, or ``loss``, the previous mean, if it has none."""
        self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
        model.train()
        chosen = poisson_sample(self.plan.num_examples, self.plan.expected_batch_size)
        for weight in optimizer.params:
            weight.summed_grad = torch.zeros_like(weight)
        losses = []
        size = self.args.per_device_train_batch_size
        for batch in _physical_batches([self.rows[index] for index in chosen], size, self.max_length):
            self._total_train_tokens += int(batch["attention_mask"].sum())
            on_device = {key: value.to(self.args.device) for key, value in batch.items()}
            losses.append(gradients.add(on_device, optimizer))
        optimizer.add_noise()
        optimizer.scale_grad()
        optimizer.original_optimizer.step()
        self.lr_scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        _require_finite(optimizer.params, self.state.global_step + 1)
        finite = [float(value) for value in torch.cat(losses) if torch.isfinite(value)] if losses else []
        return sum(finite) / len(finite) if finite else loss

    def _after_step(self, loss: float, epoch_steps: int, trial: Any, ignored: Any, started: float) -> None:
        """Count the step; log, evaluate and save as the trainer's callbacks decide."""
        state, handler = self.state, self.callback_handler
        state.global_step += 1
        state.epoch = state.global_step / epoch_steps
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        self._metrics["train"]["epsilon"] = [self.plan.epsilon_at_most(state.global_step)]
        self.control = handler.on_step_end(self.args, state, self.control)
        mean_loss = torch.tensor(loss)
        self._maybe_log_save_evaluate(mean_loss, None, self.model, trial, state.epoch, ignored, started)
        if state.global_step % epoch_steps == 0 or self.control.should_training_stop:
            self.control = handler.on_epoch_end(self.args, state, self.control)
            self._maybe_log_save_evaluate(mean_loss, None, self.model, trial, state.epoch, ignored, started)


def _physical_batches(
    rows: list[dict[str, Any]], size: int, max_length: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield batches of rows, each padded from its own length to the next multiple of ``_PAD_TO``.

    Padding to the longest row of a batch would couple rows. Padding is masked, but 0 times infinity is not 0.
    """
    by_length: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        own = max(1, len(row["input_ids"]))
        length = max(own, min(max_length, math.ceil(own / _PAD_TO) * _PAD_TO))
        by_length.setdefault(length, []).append(row)
    for length, group in sorted(by_length.items()):
        for start in range(0, len(group), size):
            yield _padded(group[start : start + size], length)


def _padded(rows: list[dict[str, Any]], length: int) -> dict[str, torch.Tensor]:
    """Return ``input_ids`` padded with a row's last token, ``labels`` and ``attention_mask``: ``[n, length]`` int64."""
    padded: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        ids = row["input_ids"]
        missing = length - len(ids)
        padded["input_ids"].append([*ids, *(ids[-1:] or [0]) * missing])
        padded["labels"].append([*row["labels"], *[IGNORED] * missing])
        padded["attention_mask"].append([1] * len(ids) + [0] * missing)
    return {key: torch.tensor(values) for key, values in padded.items()}


def _require_finite(weights: list[torch.Tensor], step: int) -> None:
    """Refuse noisy weights that are not finite. Only noisy weights may end a run, so nothing else is checked."""
    if not all(bool(torch.isfinite(weight).all()) for weight in weights):
        reason = f"the noised weights are not finite after step {step}: training has diverged"
        raise Diverged(ErrorCode.DATA_INVALID, reason, "lower learning_rate")


@cache
def private(trainer: type) -> type:
    """Return a TRL trainer class that trains with ``DpSgd``; pass its instances to ``attach_plan``."""
    return type(
        f"Private{trainer.__name__}", (DpSgd, trainer), {"__doc__": f"{trainer.__name__} with DP-SGD."}
    )


def attach_plan(trainer: Any, job: Job) -> Any:
    """Attach the privacy plan and the rows to the trainer, and return it."""
    assert job.config.privacy is not None
    trainer.plan = make_plan(job.config, len(job.encoded))
    trainer.grad_sample_mode = job.config.privacy.grad_sample_mode
    trainer.rows = job.encoded
    trainer.max_length = job.config.max_length
    return trainer


def poisson_sample(num_examples: int, expected: int) -> list[int]:
    """Return the indices of one batch, possibly empty, each drawn with probability ``expected / num_examples``.

    The probability is rounded down to a multiple of 2^-64. The accountant's amplification by sampling applies only to
    such batches. It does not apply to shuffled batches of a fixed size, nor to a seeded generator, whose seed would
    reveal the batches.
    """
    if expected >= num_examples:
        return list(range(num_examples))
    threshold = (expected << 64) // num_examples
    words = np.frombuffer(os.urandom(_WORD_BYTES * num_examples), dtype="<u8")
    return [int(index) for index in np.flatnonzero(words < np.uint64(threshold))]
