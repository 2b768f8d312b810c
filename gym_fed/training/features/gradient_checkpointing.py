"""Gradient checkpointing, Chen et al. 2016: recompute a block's activations in the backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.features.base import Feature


class GradientCheckpointing(Feature):
    """Uses transformers' non-reentrant implementation, which also works with frozen embeddings."""

    tried = "yes"

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}

    @contextmanager
    def during(self, model: Any, config: TrainingConfig) -> Iterator[None]:
        before = model.is_gradient_checkpointing
        try:
            yield
        finally:
            if not before:
                model.gradient_checkpointing_disable()
