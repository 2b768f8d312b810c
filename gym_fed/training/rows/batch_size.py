"""Find the largest batch that fits in memory (``auto_batch_size``), with trial steps on the longest rows.

The batch size is doubled until memory runs out. Gradient accumulation makes up the rest, so the global batch is
unchanged. A GPU reports when its memory is full. On a CPU, the process would be killed, so the memory growth of the
process is measured instead, and the next size is tried only if its extrapolated growth is within the budget.
"""

from __future__ import annotations

import gc
import json
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from accelerate.utils.memory import should_reduce_batch_size

from gym_fed.base.models import quiet_loading
from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.file import dump_yaml
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.files import write_atomically
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.text import counted
from gym_fed.data.encoded_table import EncodedTable
from gym_fed.doctor.checks.devices import available_memory_bytes
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.processes.group import world_size
from gym_fed.training.rows.tokenized import RunRows
from gym_fed.training.run.job import Job
from gym_fed.training.run.reproducibility import random_state_restorer
from gym_fed.training.trl_glue import restore_after_run

_GIB = 1 << 30
_FILE = "batch_size.json"
_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps")
_ADAM_BYTES = 8  # two float32 moments per trained weight, which the first step will allocate
_SAMPLING_SECONDS = 0.001

Step = Callable[[int], None]
"""Runs one forward and backward pass on N rows."""


def check_batch_size(config: TrainingConfig) -> None:
    """Refuse ``auto_batch_size`` for algorithms and numbers of processes that determine the batch size."""
    if config.auto_batch_size is None:
        return
    groups = f"a batch of {config.algorithm} consists of whole groups of answers"
    refuse_first(
        (ALGORITHMS.type_of(config.algorithm).generates, groups),
        (world_size() > 1, f"{counted(world_size(), 'process')} might each find a different size"),
        prefix="auto_batch_size: ",
        remedy="remove the section, and set per_device_train_batch_size",
    )


def known_sizes(config: TrainingConfig) -> TrainingConfig | None:
    """Return ``config`` with the batch sizes that the unfinished run in its folder has stored; None if there are none.

    Raises:
        GymError: ``FILE_EXISTS`` if their product is not the global batch of ``config``.
    """
    file = config.output_dir / _FILE
    if config.auto_batch_size is None or not file.exists():
        return None
    sizes = json.loads(file.read_text(encoding="utf-8"))
    resized = config.model_copy(update=sizes)
    if global_batch(resized) != global_batch(config):
        raise GymError(
            ErrorCode.FILE_EXISTS,
            f"{config.output_dir} holds an unfinished run with {counted(global_batch(resized), 'row')} per step, "
            f"but the config has {global_batch(config)}",
            "choose another output_dir, or pass --overwrite to delete the unfinished run",
        )
    return resized


def remember_sizes(config: TrainingConfig) -> None:
    """Store the batch sizes in the run folder for resumed runs."""
    sizes = {key: getattr(config, key) for key in _SIZES}
    write_atomically(config.output_dir / _FILE, f"{json.dumps(sizes)}\n".encode())
    write_atomically(config.output_dir / "config.yaml", dump_yaml(config).encode())


def global_batch(config: TrainingConfig) -> int:
    """Return the number of rows per optimiser step of one process."""
    return config.per_device_train_batch_size * config.gradient_accumulation_steps


def choose_batch_size(
    config: TrainingConfig, algorithm: Algorithm, model: Any, tokenizer: Any, rows: RunRows
) -> TrainingConfig:
    """Return the config with the largest batch size that fits, if ``auto_batch_size`` is set and no size is stored."""
    if config.auto_batch_size is None or known_sizes(config) is not None:
        return config

    def build(config: TrainingConfig, rows: list[dict[str, Any]]) -> Any:
        with tempfile.TemporaryDirectory() as scratch:
            return algorithm.build(Job(config, model, tokenizer, rows, None, Path(scratch), []))

    with quiet_loading():
        config = find_batch_size(config, model, build, rows.encoded)
    remember_sizes(config)
    return config


def find_batch_size(
    config: TrainingConfig, model: Any, build: Callable[[TrainingConfig, list[Any]], Any], rows: Sequence[Any]
) -> TrainingConfig:
    """Return ``config`` with the largest batch that fits, and its gradient accumulation.

    Args:
        config: The run's config, whose two batch sizes determine the global batch.
        model: The model on its device. Its weights and the random states are unchanged afterwards.
        build: Builds a trainer from a config and rows.
        rows: Encoded rows; the longest are tried.

    Raises:
        GymError: ``CONFIG_INVALID`` if a single row does not fit.
    """
    total = global_batch(config)
    longest = _longest(rows, total)
    candidates = [2**i for i in range(total.bit_length()) if total % 2**i == 0]

    def step(size: int) -> None:
        changes = {_SIZES[0]: size, _SIZES[1]: total // size}
        tried = (longest * (size // len(longest) + 1))[:size]
        with restore_after_run(model):
            trainer = build(config.model_copy(update=changes), tried)
            trainer.current_gradient_accumulation_steps = 1  # normally set by the training loop
            batch = next(iter(trainer.get_train_dataloader()))
            trainer.training_step(model, batch)
        model.zero_grad(set_to_none=True)

    with _restored(model):
        on_cuda = next(model.parameters()).device.type == "cuda"
        fits = largest_on_cuda if on_cuda else largest_on_cpu
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        size = fits(step, candidates, budget_bytes(config, on_cuda) - _ADAM_BYTES * trained)
    if size is None:
        reason = "auto_batch_size: not even one row fits into memory"
        remedy = "shorten max_length, enable gradient_checkpointing, or raise memory_gib"
        raise GymError(ErrorCode.CONFIG_INVALID, reason, remedy)
    return config.model_copy(update={_SIZES[0]: size, _SIZES[1]: total // size})


def _longest(rows: Sequence[Any], count: int) -> list[Any]:
    """Return the ``count`` longest rows, the longest first."""
    if isinstance(rows, EncodedTable):
        order = np.argsort(-rows.sizes(), kind="stable")[:count]
        return [rows[index] for index in order.tolist()]
    return sorted(rows, key=lambda row: len(json.dumps(row, default=repr)), reverse=True)[:count]


def budget_bytes(config: TrainingConfig, on_cuda: bool) -> int:
    """Return the bytes that the run may allocate in addition to its current memory."""
    settings = config.auto_batch_size
    assert settings is not None  # this function is called only if auto_batch_size is set
    if settings.memory_gib is not None:
        return int(settings.memory_gib * _GIB)
    free = torch.cuda.mem_get_info()[0] if on_cuda else available_memory_bytes()
    return int(free * settings.memory_share)


def largest_on_cuda(step: Step, candidates: list[int], budget: int) -> int | None:
    """Return the largest of ``candidates`` (ascending) within ``budget`` bytes on a GPU; None if none fits."""
    best = None
    for size in candidates:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            step(size)
        except RuntimeError as error:
            if not should_reduce_batch_size(error):
                raise
            gc.collect()
            torch.cuda.empty_cache()
            return best
        if torch.cuda.max_memory_allocated() - before > budget:
            return best
        best = size
    return best


def largest_on_cpu(step: Step, candidates: list[int], budget: int) -> int | None:
    """Return the largest of ``candidates`` (ascending) for which the process grows by at most ``budget`` bytes.

    A size is not tried if extrapolation from the two previous sizes shows that it does not fit.
    """
    base = psutil.Process().memory_info().rss
    best, before = None, 0
    for size in candidates:
        growth = _peak_rss(lambda size=size: step(size)) - base  # type: ignore[misc]  # bound at once
        if growth > budget:
            return best
        best = size
        # A doubling grows memory at most twice as much as the previous one. After one row, there is no previous one.
        expected = growth + 2 * (growth - before) if before else 2 * growth
        before = growth
        if expected > budget:
            return best
    return best


def _peak_rss(work: Callable[[], None]) -> int:
    """Return the peak memory of the process in bytes while ``work`` runs, sampled every millisecond."""
    process, peak, done = psutil.Process(), [0], threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLING_SECONDS):
            peak[0] = max(peak[0], process.memory_info().rss)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        work()
    finally:
        done.set()
        thread.join()
    return max(peak[0], process.memory_info().rss)


@contextmanager
def _restored(model: Any) -> Iterator[None]:
    """Restore random states and the model's mode on exit, and clear its gradients."""
    restore_random_state, training = random_state_restorer(), model.training
    try:
        yield
    finally:
        restore_random_state()
        model.zero_grad(set_to_none=True)
        model.train(training)
        gc.collect()
