"""Estimate the time of a step, from its operations and the measured time of one block and the head.

A token that is read costs two operations for every weight that it is multiplied by. Backwards it costs that again for
the gradients of activations, and once more for those of weights (Kaplan et al. 2020, "Scaling Laws for Neural Language
Models", section 2.1). Attention adds ``2 q T`` for each block forwards: a token looks back at ``T / 2`` on average.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import ALGORITHMS, OPTIMIZERS, TUNING
from gym_fed.training.planning.memory import row_length, tokens_of_batch
from gym_fed.training.planning.sizes import Sizes, empty_config, has_causal_lm, model_of, without_start

if TYPE_CHECKING:
    import torch

_MAX_OPERATIONS = 1e11
_MAX_WEIGHTS = 3e8
_FEWEST_TOKENS = 32
_REPETITIONS = 3
_MOVED = 6
"""Values of a trained weight that an update reads or writes besides its state: its gradient four times (to measure, to
clip and to use it) and itself twice."""


@dataclass(frozen=True)
class BlockTiming:
    """Measured seconds of the parts of a step on this machine.

    Attributes:
        block: Seconds per token in one block, forward and backward.
        rest: Seconds per token in embeddings, head and loss.
        update: Seconds per byte that clipping and the optimiser read or write.
        length: Tokens of the rows that were timed.
    """

    block: float
    rest: float
    update: float
    length: int


def step_operations(config: TrainingConfig, sizes: Sizes) -> float:
    """Floating-point operations of one optimiser step on one device."""
    return _operations_a_token(config, sizes) * tokens_of_batch(config) * config.gradient_accumulation_steps


def step_seconds(config: TrainingConfig, sizes: Sizes, measured: BlockTiming) -> float:
    """Seconds of one optimiser step: measured for the trained model, scaled by operations for the rest."""
    tokens = tokens_of_batch(config) * config.gradient_accumulation_steps
    whole = sizes.shape.layers * measured.block + measured.rest
    timed = _trained_operations(config, sizes, measured.length)
    seconds = tokens * whole * _operations_a_token(config, sizes) / timed
    return seconds + measured.update * _moved_bytes(config, sizes)


def calibrate(config: TrainingConfig, sizes: Sizes, device: Any) -> BlockTiming | None:
    """Time steps of one and three blocks of the model on ``device``.

    None where that would take long, and for a model that reads images whose language model has no class of its own.

    They have random weights, and are tuned, checkpointed and updated as ``config`` says; the update is AdamW's. On a
    CPU the clock is this thread's CPU time, so that other processes disturb less.
    """
    import torch

    shape = sizes.shape
    block = (sizes.active - shape.vocabulary * shape.hidden) / shape.layers
    weights = 3 * block + 2 * shape.vocabulary * shape.hidden
    tokens = min(tokens_of_batch(config), int(_MAX_OPERATIONS / (6 * weights)))
    length = min(row_length(config), tokens)
    alone = has_causal_lm(empty_config(config).get_text_config())
    if weights > _MAX_WEIGHTS or tokens < _FEWEST_TOKENS or not alone:
        return None
    rows = max(tokens // length, 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocabulary, (rows, length), generator=generator).to(device)
    seconds = {layers: _timed(config, layers, ids) for layers in (1, 3)}
    (single, _, _), (triple, update, moved) = seconds[1], seconds[3]
    measured = max(triple - single, 0.0) / 2
    each = rows * length
    return BlockTiming(measured / each, max(single - measured, 0.0) / each, update / moved, length)


def _timed(config: TrainingConfig, layers: int, ids: Any) -> tuple[float, float, float]:
    """Median seconds of forward, backward and update for ``layers`` blocks, and the bytes that the update moves."""
    import torch

    model, loss = _short_model(config, layers, ids)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    half = torch.float16 if config.mixed_precision == "fp16" else torch.bfloat16
    timings = []
    for _ in range(1 + _REPETITIONS):  # the first one warms up
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
    state = 2  # of AdamW
    moved = sum(weight.numel() * weight.element_size() for weight in trained) * (_MOVED + 2 * state)
    return passes, updates, float(moved)


def _short_model(config: TrainingConfig, layers: int, ids: Any) -> tuple[Any, Callable[[], Any]]:
    """A model of ``layers`` blocks trained as in ``config``, and its loss on ``ids``."""
    import torch

    from gym_fed.base.models import quiet_loading

    kind = ALGORITHMS.type_of(config.algorithm).logits(config)
    with quiet_loading():
        body = model_of(_shortened(empty_config(config), layers))
    body = body.to(device=ids.device, dtype=getattr(torch, config.loaded_dtype)).train()
    if config.gradient_checkpointing:
        body.gradient_checkpointing_enable({"use_reentrant": False})
    if kind == "tiled":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(body, outputs=("log_probs", "entropy", "is_top1"))
    model = _tuned(config, body)
    if kind == "none":
        return model, lambda: model(input_ids=ids, logits_to_keep=1, use_cache=False).logits.float().sum()
    given = {"fused_lm_head": True} if kind == "tiled" else {"use_cache": False}
    return model, lambda: model(input_ids=ids, labels=ids, **given).loss


def _tuned(config: TrainingConfig, model: Any) -> Any:
    """Add LoRA to ``model``, or freeze it as other adapters do, or leave it."""
    if not TUNING.type_of(config.finetuning).is_adapter:
        return model
    if config.lora is not None:
        named = config.lora.target_modules  # names alone: a path may point to a block that is not here
        has_names = isinstance(named, list) and all(name.isidentifier() for name in named)
        lora = config.lora.model_copy(update={"target_modules": named if has_names else "all-linear"})
        return TUNING.new(config.finetuning).prepare(
            model, without_start(config.model_copy(update={"lora": lora}))
        )
    for name, weight in model.named_parameters():
        weight.requires_grad_("norm" in name)  # few weights, so that gradients reach every block
    return model


def _now(device: torch.device) -> float:
    """Seconds: thread time on a CPU, else wall time after the device is synchronised."""
    import torch

    if device.type == "cpu":
        return time.thread_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


def _moved_bytes(config: TrainingConfig, sizes: Sizes) -> float:
    optimizer = OPTIMIZERS.new(config.optimizer)
    return math.fsum(
        _MOVED * weight.numel * weight.itemsize + 2 * optimizer.state_bytes(weight, config)
        for weight in sizes.trained
    )


def _shortened(config: Any, layers: int) -> Any:
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return text


def _forward(sizes: Sizes, length: int) -> float:
    return 2.0 * sizes.active + 2.0 * sizes.shape.layers * sizes.shape.queries * length


def _trained_operations(config: TrainingConfig, sizes: Sizes, length: int) -> float:
    """Operations per learned token of the trained model, in a row of ``length``."""
    passes = 2 if sizes.adapted else 3  # frozen matrices need no gradients of their own
    adapter = 6.0 * sizes.num_trained if sizes.adapted else 0.0
    head = 2.0 * sizes.shape.vocabulary * sizes.shape.hidden
    again = head if ALGORITHMS.type_of(config.algorithm).logits(config) == "tiled" else 0.0
    return (passes + config.gradient_checkpointing) * _forward(sizes, length) + adapter + again


def _operations_a_token(config: TrainingConfig, sizes: Sizes) -> float:
    algorithm = ALGORITHMS.type_of(config.algorithm)
    length = row_length(config)
    learned = _trained_operations(config, sizes, length)
    frozen, trained = algorithm.beside(config, adapted=sizes.adapted)
    passes = float(frozen + 3 * trained + len(algorithm.models_beside(config)))
    if algorithm.uses_reference and sizes.adapted:
        passes += 1  # with the adapter switched off
    if algorithm.writes_answers(config):
        section = config.chosen_sections()[config.algorithm]
        again = getattr(section, "num_iterations", 1)
        share = section.max_completion_length / length
        learned, passes = learned * again, passes * again + 1 + share  # scored as written, and written
    return learned + passes * _forward(sizes, length)
