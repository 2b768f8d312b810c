"""How long a step takes: the operations that it needs, and the time of one block and of the head on this machine.

A token that is read costs two operations for every weight that it is multiplied by. Backwards it costs that again for
the gradients of activations, and once more for those of weights (Kaplan et al. 2020, "Scaling Laws for Neural Language
Models", section 2.1). Attention adds ``2 q T`` for each block forwards: a token looks back at ``T / 2`` on average.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.kinds import ALGORITHMS
from gym_fed.planning.memory import row_length, tokens_of_batch
from gym_fed.planning.sizes import Sizes, empty_config

_MOST_OPERATIONS = 4e11
_MOST_WEIGHTS = 3e8
_FEWEST_TOKENS = 32


@dataclass(frozen=True)
class BlockTiming:
    """Seconds for one token forwards and backwards, measured on this machine.

    Attributes:
        block: In one block.
        rest: In embeddings, head and loss.
    """

    block: float
    rest: float


def step_operations(config: TrainingConfig, sizes: Sizes) -> float:
    """Floating-point operations of one optimiser step on one device."""
    return _operations_a_token(config, sizes) * tokens_of_batch(config) * config.gradient_accumulation_steps


def step_seconds(config: TrainingConfig, sizes: Sizes, measured: BlockTiming) -> float:
    """Seconds of one optimiser step: those of a full one by the calibration, times this one's share of operations."""
    tokens = tokens_of_batch(config) * config.gradient_accumulation_steps
    full = 3 * _forward(sizes, row_length(config))
    whole = sizes.shape.layers * measured.block + measured.rest
    return tokens * whole * _operations_a_token(config, sizes) / full


def calibrate(
    config: TrainingConfig, sizes: Sizes, device: Any, clock: Callable[[], float] = time.perf_counter
) -> BlockTiming | None:
    """Time models of one and of three blocks on ``device``; None where that would take long, or more memory than two.

    The blocks are the model's own, with random weights; ``clock`` gives seconds.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from gym_fed.models import quiet_loading

    shape = sizes.shape
    block = (sizes.active - shape.vocabulary * shape.hidden) / shape.layers
    weights = 3 * block + 2 * shape.vocabulary * shape.hidden
    tokens = min(tokens_of_batch(config), int(_MOST_OPERATIONS / (6 * weights)))
    length = min(row_length(config), tokens)
    if weights > _MOST_WEIGHTS or tokens < _FEWEST_TOKENS:
        return None
    rows = max(tokens // length, 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, shape.vocabulary, (rows, length), generator=generator).to(device)
    seconds = {}
    for layers in (1, 3):
        with quiet_loading():
            model: Any = AutoModelForCausalLM.from_config(_shortened(empty_config(config), layers))
        model = model.to(device=device, dtype=getattr(torch, config.loaded_dtype)).train()
        seconds[layers] = min(_timed(model, ids, device, clock) for _ in range(3))
    measured = max(seconds[3] - seconds[1], 0.0) / 2
    return BlockTiming(measured / (rows * length), max(seconds[1] - measured, 0.0) / (rows * length))


def _timed(model: Any, ids: Any, device: Any, clock: Callable[[], float]) -> float:
    import torch

    model.zero_grad(set_to_none=True)
    begun = clock()
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - begun


def _shortened(config: Any, layers: int) -> Any:
    text = config.get_text_config()
    text.num_hidden_layers = layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:layers]
    return text


def _forward(sizes: Sizes, length: int) -> float:
    return 2.0 * sizes.active + 2.0 * sizes.shape.layers * sizes.shape.queries * length


def _operations_a_token(config: TrainingConfig, sizes: Sizes) -> float:
    algorithm = ALGORITHMS.type_of(config.algorithm)
    forward = _forward(sizes, row_length(config))
    frozen, trained = algorithm.beside(config, adapted=sizes.adapted)
    passes: float = 2.0 if sizes.adapted else 3.0  # frozen matrices need no gradients of their own
    passes += config.gradient_checkpointing
    passes += frozen + 3 * trained + len(algorithm.models_beside(config))
    if algorithm.uses_reference and sizes.adapted:
        passes += 1  # with the adapter switched off
    if algorithm.writes_answers(config):
        section = config.chosen_sections()[config.algorithm]
        share = section.max_completion_length / row_length(config)
        passes = (
            passes * getattr(section, "num_iterations", 1) + 1 + share
        )  # written, and scored as they were written
    return passes * forward + (6.0 * sizes.num_trained if sizes.adapted else 0.0)
