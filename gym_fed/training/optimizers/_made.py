"""Optimisers that are classes of a library: the class, its requirements, and which of its arguments users may set.

Nothing heavy is imported before one is checked or made, so that the registry can list them.
"""

from __future__ import annotations

import importlib
import inspect
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import TUNING
from gym_fed.core.requirements import require_cuda, require_package
from gym_fed.training.optimizers.base import OptimizerChoice, TrainedWeight, check_known, refuse_betas

_SMALLEST_IN_8_BITS = 4096
"""Values that a tensor has at least where bitsandbytes keeps its state in 8 bits."""

_OURS = {"self", "params", "model", "lr", "betas", "weight_decay", "kwargs", "args", "maximize", "closure"}


@dataclass(frozen=True)
class MadeOptimizer(OptimizerChoice):
    """An optimiser that is created by calling its class on groups of weights, with and without decay.

    Attributes:
        source: ``module:Class``.
        package: The required package; None for torch and transformers.
        extra: The extra of ours that installs it.
        betas: Whether it takes ``betas``; without, ``adam_beta1`` and ``adam_beta2`` are refused.
        fixed: Arguments that are not the user's.
        gpu: Why it needs a CUDA GPU; empty when it does not.
        shards: See ``OptimizerChoice``.
        per_example: The same.
        learning_rate_scale: The same.
        state_values: The same; a momentum that the config sets is one more.
        state_bits: Bits of a value of state in bitsandbytes, whose blocks of 256 share a scale; 0 for others.
    """

    source: str
    package: str | None = None
    extra: str = "optim"
    betas: bool = True
    fixed: Mapping[str, Any] = field(default_factory=dict)
    gpu: str = ""
    shards: bool = False
    per_example: bool = False
    learning_rate_scale: float | None = 1.0
    state_values: float = 2.0
    state_bits: int = 0

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        values = self.state_values + bool(config.optimizer_args.get("momentum"))
        if not self.state_bits:
            return values * weight.numel * weight.itemsize
        if self.state_bits == 32 or weight.numel < _SMALLEST_IN_8_BITS:
            return values * weight.numel * 4
        return values * (weight.numel + 4 * math.ceil(weight.numel / 256))

    def check(self, config: TrainingConfig) -> None:
        key = f"optimizer: {config.optimizer}"
        if self.package is not None:
            require_package(self.package, key, self.extra)
        if self.gpu:
            require_cuda(f"{key} ({self.gpu})")
        if not self.betas:
            refuse_betas(config)
        if config.lora is not None and config.lora.loraplus_lr_ratio is not None:
            self.check_loraplus(config)
        check_known(config, self.known())
        self.try_arguments(config)

    def check_loraplus(self, config: TrainingConfig) -> None:
        """Refuse ``lora.loraplus_lr_ratio`` if the optimiser groups weights differently. Most accept any groups."""

    def known(self) -> list[str]:
        """Return the names that ``optimizer_args`` may hold."""
        parameters = inspect.signature(self.type().__init__).parameters
        return [name for name in parameters if name not in _OURS and name not in self.fixed]

    def try_arguments(self, config: TrainingConfig) -> None:
        """Create an optimiser of four numbers, so that a wrong value is refused before a model is loaded."""
        import torch

        self.construct([{"params": [torch.nn.Parameter(torch.zeros(2, 2))]}], config)

    def make(self, model: Any, config: TrainingConfig) -> Any:
        return self.construct(grouped(model, config), config)

    def construct(self, groups: Any, config: TrainingConfig) -> Any:
        """Create the optimiser of ``groups``.

        Raises:
            GymError: ``CONFIG_INVALID`` when the class refuses its arguments.
        """
        taken: dict[str, Any] = {"lr": config.learning_rate, **self.fixed, **config.optimizer_args}
        if self.betas:
            taken["betas"] = (config.adam_beta1, config.adam_beta2)
        return called(config, lambda: self.type()(groups, **taken))

    def type(self) -> Any:
        """Return the optimiser's class."""
        return imported(self.source)


def imported(source: str) -> Any:
    """Import ``module:name`` without its library's warnings."""
    module, _, name = source.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(module), name)


def called(config: TrainingConfig, make: Any) -> Any:
    """Return ``make()``; complaints about values become a ``GymError``.

    Raises:
        GymError: ``CONFIG_INVALID``.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of GaLore and APOLLO, about their own AdamW
            return make()
    except (TypeError, ValueError, AssertionError) as error:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"optimizer_args: {config.optimizer} refuses them: {error}",
            "correct or remove them",
        ) from error


def refuse_adapters(config: TrainingConfig, why: str) -> None:
    """Refuse an optimiser that only makes sense if whole weights are trained."""
    is_adapter = TUNING.type_of(config.finetuning).is_adapter
    reason = f"optimizer: {config.optimizer} {why}; finetuning is {config.finetuning}"
    refuse_first((is_adapter, reason, "use finetuning: full or freeze, or another optimizer"))


def split(model: Any, config: TrainingConfig) -> list[tuple[str, Any, float]]:
    """Return trainable weights of ``model``: name, parameter, and decay (norms and biases have none)."""
    from torch import nn
    from transformers.trainer_pt_utils import get_parameter_names

    spared = [
        r"bias",
        r"layernorm",
        r"rmsnorm",
        r"(?:^|\.)norm(?:$|\.)",
        r"_norm(?:$|\.)",
    ]  # as transformers does
    decayed = set(get_parameter_names(model, [nn.LayerNorm], spared))
    return [
        (name, value, config.weight_decay if name in decayed else 0.0)
        for name, value in model.named_parameters()
        if value.requires_grad
    ]


def hidden_matrices(model: Any) -> set[int]:
    """Return the ids (``id``) of the weights of linear layers, except the output head."""
    from torch import nn

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    return {id(module.weight) for module in linear if module is not head}


def grouped(model: Any, config: TrainingConfig) -> list[dict[str, Any]]:
    """Group trainable weights by decay, and under LoRA+ by learning rate."""
    if config.lora is not None and config.lora.loraplus_lr_ratio is not None:
        return _loraplus(model, config, config.lora.loraplus_lr_ratio)
    weights = split(model, config)
    groups = [
        {
            "params": [value for _, value, decay in weights if decay == group_decay],
            "weight_decay": group_decay,
        }
        for group_decay in dict.fromkeys((config.weight_decay, 0.0))
    ]
    return [group for group in groups if group["params"]]


class _Groups:
    """A replacement of an optimiser's class where PEFT builds the groups and calls it at once."""

    def __init__(self, groups: list[dict[str, Any]], **_: Any) -> None:
        self.groups = [group for group in groups if group["params"]]


def _loraplus(model: Any, config: TrainingConfig, ratio: float) -> list[dict[str, Any]]:
    from peft.optimizers import create_loraplus_optimizer

    collected: Any = create_loraplus_optimizer(
        model,
        _Groups,  # type: ignore[arg-type]
        lr=config.learning_rate,
        loraplus_lr_ratio=ratio,
        loraplus_weight_decay=config.weight_decay,
        loraplus_lr_embedding=config.learning_rate,
    )
    groups: list[dict[str, Any]] = collected.groups
    return groups
