"""Choose the attention implementation for training: torch's, an explicit one, or GPU kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.requirements import require_cuda, require_package
from gym_fed.training.features.base import Feature

_ON_CUDA_ONLY = ("flash_attention_2", "flex_attention")


class Attention(Feature):
    """Sets transformers' attention implementation, and restores the previous one after training."""

    tried = "eager and sdpa; rejection of the CUDA-only ones"

    per_example = True

    def check(self, config: TrainingConfig) -> None:
        key = f"attention: {config.attention}"
        if config.attention in _ON_CUDA_ONLY:  # flex attention has no backward pass on a CPU
            require_cuda(key)
        if config.attention != "flash_attention_2":
            return
        require_package("flash_attn", key, remedy="pip install flash-attn, or set attention: sdpa")
        reason = f"{key} supports only 16-bit dtypes, but the run is in float32"
        remedy = "set mixed_precision: bf16, or dtype: bfloat16"
        refuse_first((config.loaded_dtype == "float32" and config.mixed_precision == "no", reason, remedy))

    @contextmanager
    def during(self, model: Any, config: TrainingConfig) -> Iterator[None]:
        with attention_of(model, config.attention):
            yield


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """Set the model's attention implementation within a context.

    Raises:
        GymError: ``MODEL_INVALID`` if the model's code does not support it.
    """
    before = model.config._attn_implementation
    reason = f"attention: {type(model).__name__} does not support {name}"
    remedy = f"it uses {before}; remove attention and shift_attention"
    error = GymError(ErrorCode.MODEL_INVALID, reason, remedy)
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as refused:
        raise error from refused
    if model.config._attn_implementation != name:
        raise error
    try:
        yield
    finally:
        model.set_attn_implementation(before)
