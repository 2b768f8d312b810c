"""Settings of the optimiser, learning rate, schedule and DP-SGD, named as in TRL and Opacus."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from gym_fed.config.hub.privacy import LocalPrivacy, TargetDelta
from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.member import MemberOf
from gym_fed.core.registries import OPTIMIZERS

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?[eE][+-]?[0-9]+")

# The arguments of each transformers schedule except the numbers of steps.
_SCHEDULES: dict[str, tuple[str, ...]] = {
    "linear": (),
    "constant": (),
    "constant_with_warmup": (),
    "cosine": ("num_cycles",),
    "cosine_with_restarts": ("num_cycles",),
    "polynomial": ("lr_end", "power"),
    "inverse_sqrt": ("timescale",),
    "cosine_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles"),
    "cosine_warmup_with_min_lr": ("min_lr", "min_lr_rate", "num_cycles", "warmup_lr_rate"),
    "warmup_stable_decay": (
        "num_decay_steps",
        "num_stable_steps",
        "warmup_type",
        "decay_type",
        "min_lr_ratio",
        "num_cycles",
    ),
}


class OptimizationSections(StrictModel):
    """Top-level keys of the YAML file."""

    optimizer: Annotated[str, MemberOf(OPTIMIZERS)] = "adamw"
    """Name of an optimiser in ``gym_fed/training/optimizers``, or of an installed package."""

    optimizer_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the optimiser; unknown names are refused."""

    learning_rate: float = Field(default=1e-3, gt=0)
    lr_scheduler_type: Literal[
        "linear",
        "cosine",
        "constant",
        "constant_with_warmup",
        "cosine_with_restarts",
        "polynomial",
        "inverse_sqrt",
        "cosine_with_min_lr",
        "cosine_warmup_with_min_lr",
        "warmup_stable_decay",
    ] = "linear"
    lr_scheduler_kwargs: dict[str, float | int | str] = Field(default_factory=dict)
    """Further arguments of the schedule, such as ``min_lr_rate`` or ``num_decay_steps``; unknown names are refused."""

    warmup_steps: int = Field(default=0, ge=0)
    warmup_ratio: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of all steps used for warmup, instead of ``warmup_steps``."""

    weight_decay: float = Field(default=0.0, ge=0)
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    adam_beta2: float = Field(default=0.999, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Norm to which gradients are clipped; 0 = no clipping."""

    max_steps: int | None = Field(default=None, ge=1)
    """Number of optimiser steps; overrides ``num_train_epochs``."""

    num_train_epochs: float = Field(default=1.0, gt=0)
    per_device_train_batch_size: int = Field(default=8, ge=1)
    gradient_accumulation_steps: int = Field(default=1, ge=1)

    @field_validator("optimizer_args", "lr_scheduler_kwargs", mode="before")
    @classmethod
    def _parse_numbers(cls, values: Any) -> Any:
        """Convert numbers such as ``1e-4``, which YAML reads as text."""
        if not isinstance(values, dict):
            return values
        return {name: _number(value) for name, value in values.items()}

    @model_validator(mode="after")
    def _validate_schedule(self) -> OptimizationSections:
        kind, given = self.lr_scheduler_type, self.lr_scheduler_kwargs
        known = _SCHEDULES[kind]
        for name in given:
            if name not in known:
                takes = ", ".join(known) or "none"
                raise ValueError(f"lr_scheduler_kwargs: {kind} has no argument {name!r}; it accepts {takes}")
        if "min_lr" in known and ("min_lr" in given) == ("min_lr_rate" in given):
            raise ValueError(f"lr_scheduler_kwargs: {kind} needs either min_lr or min_lr_rate")
        if kind == "warmup_stable_decay" and "num_decay_steps" not in given:
            raise ValueError("lr_scheduler_kwargs: warmup_stable_decay needs num_decay_steps")
        if kind == "polynomial" and float(given.get("lr_end", 1e-7)) >= self.learning_rate:
            raise ValueError("lr_scheduler_kwargs: lr_end is not below learning_rate")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError("give either warmup_steps or warmup_ratio, not both")
        for key in ("warmup_steps", "warmup_ratio"):
            if kind != "constant" or not getattr(self, key):
                continue
            # A schedule-free optimiser needs `constant`; it has its own warm-up or refuses the key.
            if not OPTIMIZERS.new(self.optimizer).replaces_schedule:
                raise ValueError(
                    f"{key}: lr_scheduler_type constant has no warm-up; use constant_with_warmup"
                )
        return self


def _number(value: Any) -> Any:
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return float(value)
    return value


class TrainingPrivacy(StrictModel):
    """DP-SGD (Abadi et al. 2016, arXiv:1607.00133): example-level, batches are Poisson samples.

    Adjacency: neighbouring datasets differ by one example, a row of the data.
    """

    noise_multiplier: Annotated[float, Field(gt=0)] | None = None
    """Standard deviation of a step's noise, divided by ``max_grad_norm``."""

    target_epsilon: Annotated[float, Field(gt=0)] | None = None
    """Epsilon of the whole run, instead of ``noise_multiplier``; the smallest sufficient noise is computed."""

    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """L2 norm to which the gradient of every example is clipped."""

    target_delta: TargetDelta = 1e-5
    grad_sample_mode: Literal["hooks", "functorch", "ghost"] = "hooks"
    """Computation of per-example gradients; ``ghost`` computes only their norms and needs less memory."""

    @model_validator(mode="after")
    def _validate_noise(self) -> TrainingPrivacy:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError("give either noise_multiplier or target_epsilon")
        return self

    @classmethod
    def of(cls, local: LocalPrivacy) -> TrainingPrivacy:
        """Return the settings of a round's recipe."""
        return cls(**local.model_dump())


class PrivacySections(StrictModel):
    """Top-level keys of the YAML file."""

    privacy: TrainingPrivacy | None = None
    """Train with differential privacy, by an algorithm whose loss is a mean over examples (``sft``, ``pretrain``).
    See the guide to private training."""
