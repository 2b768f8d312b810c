"""How weights are updated: optimiser, learning rate and its schedule; words are TRL's."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from gym_fed.config.base import StrictModel


class OptimizationSections(StrictModel):
    """Keys of the YAML's top level."""

    optimizer: str = "adamw"
    """A registered optimiser: the name of an entry of ``gym_fed/training/optimizers``."""

    optimizer_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimiser; unknown ones are refused."""

    learning_rate: float = Field(default=1e-3, gt=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are clipped to this norm; 0 leaves them alone."""

    max_steps: int | None = Field(default=None, ge=1)
    """Optimiser steps; wins over ``num_train_epochs``."""

    num_train_epochs: float = Field(default=1.0, gt=0)
    per_device_train_batch_size: int = Field(default=8, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)
