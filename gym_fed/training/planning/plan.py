"""Plan a run from its config: memory by component, steps, and time on this machine.

The time of a step is computed from its number of operations and the measured time of one block and the head. In the
forward pass, a token costs two operations for each weight that multiplies it. The backward pass costs the same for the
gradients of the activations, and once more for those of the weights (Kaplan et al. 2020, "Scaling Laws for Neural
Language Models", section 2.1). Attention adds ``2 q T`` per block in the forward pass, since a token attends to ``T /
2`` tokens on average.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_fed.base.models import pick_device
from gym_fed.config.train.training import DataConfig, TrainingConfig
from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALGORITHMS, OPTIMIZERS, TUNING
from gym_fed.core.text import counted
from gym_fed.doctor.checks.devices import total_memory_bytes
from gym_fed.training.model.architecture import fresh_config
from gym_fed.training.planning.memory import Memory, memory_of, row_length, tokens_of_batch
from gym_fed.training.planning.sizes import Sizes, has_causal_lm, model_of, sizes_of, without_start

if TYPE_CHECKING:
    import torch


_MAX_OPERATIONS = 1e11
_MAX_WEIGHTS = 3e8
_MIN_TOKENS = 32
_REPETITIONS = 3

_VALUES_PER_UPDATE = 6
"""Values per trained weight that an update reads or writes, in addition to the optimiser state: the gradient four times
(norm, clipping, use) and the weight twice."""


@dataclass(frozen=True)
class RunPlan:
    """The memory, steps and time that a run needs.

    Attributes:
        sizes: The weights of the run's model.
        memory: The memory of one process.
        device: Type of the run's device.
        available: Memory of the device in bytes; None if this machine has no such device.
        tokens: Maximum number of tokens per step.
        operations: Number of floating-point operations per step.
        steps: Number of steps of the run; None if the number of rows is unknown.
        seconds: Seconds per step on this machine; None if the model is too large to time.
    """

    sizes: Sizes
    memory: Memory
    device: str
    available: int | None
    tokens: int
    operations: float
    steps: int | None
    seconds: float | None

    def facts(self) -> dict[str, Any]:
        """Return the plan for ``--json``."""
        return {
            "weights": self.sizes.total,
            "trained": self.sizes.num_trained,
            "device": self.device,
            "memory": {name: round(value) for name, value in self.memory.parts().items()},
            "peak_bytes": round(self.memory.peak),
            "available_bytes": self.available,
            "tokens_per_step": self.tokens,
            "operations_per_step": self.operations,
            "steps": self.steps,
            "seconds_per_step": self.seconds,
        }

    def lines(self) -> list[tuple[str, str]]:
        """Return the plan as pairs of a name and a text."""
        trained = self.sizes.num_trained
        share = trained / (self.sizes.frozen + trained)
        lines = [("weights", f"{self.sizes.total:,}"), ("trained", f"{trained:,} ({share:.2%})")]
        lines += [(f"  {name}", gib(value)) for name, value in self.memory.parts().items() if value]
        has = "which this machine lacks" if self.available is None else f"which has {gib(self.available)}"
        lines += [
            ("memory at the peak", f"{gib(self.memory.peak)} on {self.device}, {has}"),
            ("tokens per step", f"{self.tokens:,} at most"),
            ("operations per step", f"{self.operations:.2e}"),
            ("steps", "depends on the rows" if self.steps is None else f"{self.steps:,}"),
        ]
        if self.available is None:
            lines.append(("time", f"not measured: this machine has no {self.device}"))
        elif self.seconds is None:
            reason = "the model's blocks are too large for this machine, or it reads images"
            lines.append(("time", f"not measured: {reason}"))
        else:
            lines.append(("time per step", f"{self.seconds:.2f} s, calibrated on this machine"))
            if self.steps is not None:
                lines.append(("time", duration(self.seconds * self.steps)))
        return lines


def plan_run(
    config: TrainingConfig, *, processes: int = 1, device: str | None = None, timed: bool = True
) -> RunPlan:
    """Estimate the memory, steps and time of a run without reading weights.

    Args:
        config: The run's config.
        processes: Number of processes of the run.
        device: Type of the device whose memory is estimated (``cpu``, ``cuda`` or ``mps``); by default the run's.
        timed: True to measure the time of some blocks on this machine.

    Raises:
        GymError: Errors from ``sizes_of``.
    """
    here = _device_of(config, device)
    kind = device or str(config.device).partition(":")[0] if here is None else here.type
    sizes = sizes_of(config)
    memory = memory_of(config, sizes, device=kind, processes=processes)
    measured = calibrate(config, sizes, here) if timed and here is not None else None
    return RunPlan(
        sizes,
        memory,
        kind,
        None if here is None else available_bytes(here),
        tokens_of_batch(config) * config.gradient_accumulation_steps,
        step_operations(config, sizes),
        steps_of(config, processes),
        None if measured is None else step_seconds(config, sizes, measured),
    )


def steps_of(config: TrainingConfig, processes: int = 1) -> int | None:
    """Return the number of optimiser steps of a run; None if its rows are on the Hub and their number is unknown."""
    if config.max_steps is not None:
        return config.max_steps
    counts = [_rows_of(source) for source in config.data]
    if None in counts or not counts:
        return None
    rows = sum(count for count in counts if count is not None)
    if split := (0 if config.eval_data else config.eval_split):
        rows = max(rows - round(split * rows if split < 1 else split), 1)
    batch = config.per_device_train_batch_size * config.gradient_accumulation_steps * processes
    if ALGORITHMS.type_of(config.algorithm).generates:
        batch = max(batch // config.chosen_sections()[config.algorithm].num_generations, 1)
    return max(round(-(-rows // batch) * config.num_train_epochs), 1)


def _rows_of(source: DataConfig) -> int | None:
    from gym_fed.config.train.catalogue import catalogue_entry
    from gym_fed.data.sources import source_rows

    if source.hub is not None or source.name is not None:
        rows = None if source.name is None else catalogue_entry(source.name).rows
        if source.split is not None or rows is None:
            return source.num_examples
        return round(min(rows, source.num_examples or rows) * source.weight)
    return round(sum(1 for _ in source_rows(source)) * source.weight)


def _device_of(config: TrainingConfig, kind: str | None) -> Any:
    """Return the run's device, or a device of type ``kind``; None if this machine has no such device."""
    try:
        return pick_device(kind or config.device)
    except GymError:
        return None


def available_bytes(device: Any) -> int:
    """Return the total memory of a device in bytes; for a CPU, at most the container's limit."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return total_memory_bytes()


@dataclass(frozen=True)
class BlockTiming:
    """Measured times of the parts of a step on this machine.

    Attributes:
        block: Seconds per token in one block, forward and backward.
        rest: Seconds per token in embeddings, head and loss.
        update: Seconds per byte that clipping and the optimiser read or write.
        length: Number of tokens per timed row.
    """

    block: float
    rest: float
    update: float
    length: int


def step_operations(config: TrainingConfig, sizes: Sizes) -> float:
    """Return the floating-point operations of one optimiser step on one device."""
    return _operations_per_token(config, sizes) * tokens_of_batch(config) * config.gradient_accumulation_steps


def step_seconds(config: TrainingConfig, sizes: Sizes, measured: BlockTiming) -> float:
    """Return the seconds per optimiser step: the measured time, scaled by the ratio of operations."""
    tokens = tokens_of_batch(config) * config.gradient_accumulation_steps
    per_token = sizes.shape.layers * measured.block + measured.rest
    timed_operations = _trained_operations(config, sizes, measured.length)
    seconds = tokens * per_token * _operations_per_token(config, sizes) / timed_operations
    return seconds + measured.update * _moved_bytes(config, sizes)


def calibrate(config: TrainingConfig, sizes: Sizes, device: Any) -> BlockTiming | None:
    """Time steps of one and of three blocks of the model on ``device``; return None if that would take too long.

    Also returns None for a model that reads images and has no separate language model class. The blocks have random
    weights, use the config's tuning method and checkpointing, and are updated by AdamW. On a CPU, this thread's CPU
    time is measured, which other processes affect less.
    """
    import torch

    shape = sizes.shape
    block = (sizes.active - shape.vocabulary * shape.hidden) / shape.layers
    weights = 3 * block + 2 * shape.vocabulary * shape.hidden
    tokens = min(tokens_of_batch(config), int(_MAX_OPERATIONS / (6 * weights)))
    length = min(row_length(config), tokens)
    is_separate = has_causal_lm(fresh_config(config).get_text_config())
    if weights > _MAX_WEIGHTS or tokens < _MIN_TOKENS or not is_separate:
        return None
    rows = max(tokens // length, 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocabulary, (rows, length), generator=generator).to(device)
    seconds = {layers: _time_blocks(config, layers, ids) for layers in (1, 3)}
    (single, _, _), (triple, update, moved) = seconds[1], seconds[3]
    per_block, timed = max(triple - single, 0.0) / 2, rows * length
    return BlockTiming(per_block / timed, max(single - per_block, 0.0) / timed, update / moved, length)


def _time_blocks(config: TrainingConfig, layers: int, ids: Any) -> tuple[float, float, float]:
    """Return the median seconds of both passes and of the update of ``layers`` blocks, and the bytes of the update."""
    import torch

    model, loss = _short_model(config, layers, ids)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    half = torch.float16 if config.mixed_precision == "fp16" else torch.bfloat16
    timings = []
    for _ in range(1 + _REPETITIONS):  # the first is a warm-up
        begun = _now(ids.device)
        with torch.autocast(ids.device.type, half, enabled=config.mixed_precision != "no"):
            value = loss()
        value.backward()
        passed = _now(ids.device)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        timings.append((passed - begun, _now(ids.device) - passed))
    passes, updates = (statistics.median(values) for values in zip(*timings[1:], strict=True))
    num_values = _VALUES_PER_UPDATE + 2 * 2  # AdamW reads and writes two moments
    moved = num_values * sum(weight.numel() * weight.element_size() for weight in trained)
    return passes, updates, float(moved)


def _short_model(config: TrainingConfig, layers: int, ids: Any) -> tuple[Any, Callable[[], Any]]:
    """Return a model with ``layers`` blocks, trained as in ``config``, and the function for its loss on ``ids``."""
    import torch

    from gym_fed.base.models import quiet_loading

    kind = ALGORITHMS.type_of(config.algorithm).logits(config)
    with quiet_loading():
        body = model_of(_truncate(fresh_config(config), layers))
    body = body.to(device=ids.device, dtype=getattr(torch, config.loaded_dtype)).train()
    if config.gradient_checkpointing:
        body.gradient_checkpointing_enable({"use_reentrant": False})
    if kind == "tiled":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(body, outputs=("log_probs", "entropy", "is_top1"))
    model = _tune(config, body)
    if kind == "none":
        return model, lambda: model(input_ids=ids, logits_to_keep=1, use_cache=False).logits.float().sum()
    options = {"fused_lm_head": True} if kind == "tiled" else {"use_cache": False}
    return model, lambda: model(input_ids=ids, labels=ids, **options).loss


def _tune(config: TrainingConfig, model: Any) -> Any:
    """Add LoRA to ``model``, or freeze it like other adapters do; unchanged for full tuning."""
    if not TUNING.type_of(config.finetuning).is_adapter:
        return model
    if config.lora is not None:
        targets = config.lora.target_modules
        has_names = isinstance(targets, list) and all(name.isidentifier() for name in targets)
        if not has_names:
            targets = "all-linear"  # a path in the config may refer to a missing block
        lora = config.lora.model_copy(update={"target_modules": targets})
        plain = without_start(config.model_copy(update={"lora": lora}))
        return TUNING.new(config.finetuning).prepare(model, plain)
    for name, weight in model.named_parameters():
        weight.requires_grad_("norm" in name)  # few weights, but gradients reach every block
    return model


def _now(device: torch.device) -> float:
    """Return the current time in seconds: thread time on a CPU, otherwise wall time after synchronising the device."""
    import torch

    if device.type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def _moved_bytes(config: TrainingConfig, sizes: Sizes) -> float:
    optimizer = OPTIMIZERS.new(config.optimizer)
    return math.fsum(
        _VALUES_PER_UPDATE * weight.numel * weight.itemsize + 2 * optimizer.state_bytes(weight, config)
        for weight in sizes.trained
    )


def _truncate(config: Any, layers: int) -> Any:
    """Return the text config with a different number of layers, whose types repeat those of the original layers."""
    text = config.get_text_config()
    before = text.num_hidden_layers
    for key, value in vars(text).items():
        if isinstance(value, list) and len(value) == before:
            setattr(text, key, [value[layer % before] for layer in range(layers)])
    text.num_hidden_layers = layers
    return text


def _forward(sizes: Sizes, length: int) -> float:
    return 2.0 * sizes.active + 2.0 * sizes.shape.layers * sizes.shape.queries * length


def _trained_operations(config: TrainingConfig, sizes: Sizes, length: int) -> float:
    """Return the operations per learned token of the trained model, in a row of ``length`` tokens."""
    passes = 2 if sizes.adapted else 3  # frozen matrices need no weight gradients
    adapter = 6.0 * sizes.num_trained if sizes.adapted else 0.0
    head = 2.0 * sizes.shape.vocabulary * sizes.shape.hidden
    recomputed = head if ALGORITHMS.type_of(config.algorithm).logits(config) == "tiled" else 0.0
    return (passes + config.gradient_checkpointing) * _forward(sizes, length) + adapter + recomputed


def _operations_per_token(config: TrainingConfig, sizes: Sizes) -> float:
    algorithm = ALGORITHMS.type_of(config.algorithm)
    length = row_length(config)
    learned = _trained_operations(config, sizes, length)
    frozen, trained = algorithm.beside(config, adapted=sizes.adapted)
    passes = float(frozen + 3 * trained + len(algorithm.models_beside(config)))
    if algorithm.uses_reference and sizes.adapted:
        passes += 1  # for the reference, which is the model with its adapter disabled
    if algorithm.writes_answers(config):
        section = config.chosen_sections()[config.algorithm]
        iterations = getattr(section, "num_iterations", 1)
        generated = section.max_completion_length / length
        learned *= iterations
        passes = passes * iterations + 1 + generated  # answers are scored once and generated once
    return learned + passes * _forward(sizes, length)


def gib(value: float) -> str:
    """Format a number of bytes in GiB, or in MiB if it is small."""
    return f"{value / (1 << 30):.2f} GiB" if value >= 1 << 28 else f"{value / (1 << 20):.1f} MiB"


def duration(seconds: float) -> str:
    """Format a duration in a readable unit."""
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{counted(round(seconds), 'second')}"
