"""Define the base classes of optimisers: for any value of ``optimizer``, and for those that are a library's class.

No library is imported until an optimiser is checked or created, so that the registry can list them quickly.
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
from gym_fed.core.errors import ErrorCode, GymError, refuse_first, refuse_set
from gym_fed.core.registries import TUNING
from gym_fed.core.requirements import require_cuda, require_package

_MIN_8_BIT_VALUES = 4096
"""Minimum number of values in a tensor for which bitsandbytes stores the state in 8 bits."""

_OWN_ARGUMENTS = {
    "self",
    "params",
    "model",
    "lr",
    "betas",
    "weight_decay",
    "kwargs",
    "args",
    "maximize",
    "closure",
}


class OptimizerChoice:
    """An optimiser. Instances are stateless. Subclasses override ``arguments`` or ``make``."""

    shards: bool = False
    """True if it supports weights that are sharded across processes."""

    per_example: bool = False
    """True if it uses only the (noisy) gradients, so that ``privacy`` may use it."""

    learning_rate_scale: float | None = 1.0
    """Usual learning rate relative to AdamW's; None if unknown, in which case the user must set the rate."""

    replaces_schedule: bool = False
    """True if it replaces the learning rate schedule, so that a constant schedule is required."""

    whole_weights: bool = False
    """True if it needs whole weight matrices or layers, so that it cannot train an adapter."""

    makes_lora_fa: bool = False
    """True if it implements LoRA-FA for ``lora.lora_fa``."""

    state_values: float = 2.0
    """Number of state values per trained value, in the same dtype; used by ``state_bytes``."""

    of_one_model: str = ""
    """Reason why it cannot train a second model (a critic), as a verb phrase for messages; empty if it can."""

    of_one_process: str = ""
    """Reason why several processes cannot use it, as a verb phrase for messages; empty if they can."""

    def check(self, config: TrainingConfig) -> None:
        """Refuse a config that this optimiser, machine or installation does not support, before anything is loaded.

        This implementation refuses ``optimizer_args``, betas and LoRA+. An optimiser that supports them overrides it.

        Raises:
            GymError: ``CONFIG_INVALID`` or ``MISSING_DEPENDENCY``, with the key and the remedy.
        """
        check_known(config, [])
        refuse_betas(config)
        refuse_loraplus(config)

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        """Return keyword arguments for ``transformers.TrainingArguments`` (``optim``, ``optim_args``, ...)."""
        return {}

    def make(self, model: Any, config: TrainingConfig) -> Any | None:
        """Create the ``torch.optim.Optimizer`` for the model's trainable weights; None if transformers creates it."""
        return None

    def state_bytes(self, weight: TrainedWeight, config: TrainingConfig) -> float:
        """Return the bytes of optimiser state for one trained tensor after the first step."""
        return self.state_values * weight.numel * weight.itemsize

    def callbacks(self, config: TrainingConfig) -> list[Any]:
        """Return the ``transformers.TrainerCallback`` objects that the optimiser needs."""
        return []


@dataclass(frozen=True)
class LibraryOptimizer(OptimizerChoice):
    """An optimiser that is created from a library's class, with groups of weights with and without decay.

    Attributes:
        source: The class, as ``module:Class``.
        package: Required package; None for torch and transformers.
        extra: Extra of gym-fed that installs the package.
        betas: True if it accepts ``betas``; otherwise ``adam_beta1`` and ``adam_beta2`` are refused.
        fixed: Arguments that users cannot set.
        gpu: Reason why it needs a CUDA GPU; empty if it does not.
        state_bits: Bits per state value in bitsandbytes, whose blocks of 256 values share a scale; 0 for other
            libraries.

    See ``OptimizerChoice`` for the other attributes. A momentum in the config adds one to ``state_values``.
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
        if self.state_bits == 32 or weight.numel < _MIN_8_BIT_VALUES:
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
        """Refuse ``lora.loraplus_lr_ratio`` if the optimiser has its own parameter groups."""

    def known(self) -> list[str]:
        """Return the valid names in ``optimizer_args``."""
        parameters = inspect.signature(self.type().__init__).parameters
        return [name for name in parameters if name not in _OWN_ARGUMENTS and name not in self.fixed]

    def try_arguments(self, config: TrainingConfig) -> None:
        """Create an optimiser for a small tensor, so that invalid values are refused before a model is loaded."""
        import torch

        self.construct([{"params": [torch.nn.Parameter(torch.zeros(2, 2))]}], config)

    def make(self, model: Any, config: TrainingConfig) -> Any:
        return self.construct(parameter_groups(model, config), config)

    def construct(self, groups: Any, config: TrainingConfig) -> Any:
        """Create the optimiser for parameter groups.

        Raises:
            GymError: ``CONFIG_INVALID`` if the class refuses its arguments.
        """
        arguments: dict[str, Any] = {"lr": config.learning_rate, **self.fixed, **config.optimizer_args}
        if self.betas:
            arguments["betas"] = (config.adam_beta1, config.adam_beta2)
        return create_checked(config, lambda: self.type()(groups, **arguments))

    def type(self) -> Any:
        """Return the optimiser's class."""
        return import_class(self.source)


@dataclass(frozen=True)
class TrainedWeight:
    """The properties of a trained tensor on which the size of its optimiser state depends.

    Attributes:
        shape: Shape of the tensor.
        itemsize: Bytes per value.
        hidden: True for the matrix of a linear layer other than the output head.
    """

    shape: tuple[int, ...]
    itemsize: int = 4
    hidden: bool = False

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)


def factored_bytes(weight: TrainedWeight) -> float:
    """Return the bytes of float32 second moments that are stored per row and column (Shazeer and Stern 2018)."""
    shape = weight.shape
    if len(shape) < 2:
        return 4.0 * weight.numel
    return 4.0 * (weight.numel // shape[-1] + weight.numel // shape[-2])


def check_known(config: TrainingConfig, known: list[str]) -> None:
    """Refuse names in ``optimizer_args`` that are not in ``known``."""
    remedy = f"it accepts {', '.join(sorted(known)) or 'none'}"
    for name in config.optimizer_args:
        reason = f"optimizer_args: {config.optimizer} has no argument {name!r}"
        refuse_first((name not in known, reason, remedy))


def refuse_betas(config: TrainingConfig) -> None:
    """Refuse ``adam_beta1`` and ``adam_beta2`` for an optimiser without betas."""
    refuse_set(config, ("adam_beta1", "adam_beta2"), f"optimizer {config.optimizer} has no betas")


def refuse_loraplus(config: TrainingConfig) -> None:
    """Refuse LoRA+ for an optimiser with its own parameter groups."""
    is_set = config.lora is not None and config.lora.loraplus_lr_ratio is not None
    reason = f"lora.loraplus_lr_ratio: optimizer {config.optimizer} has its own parameter groups"
    refuse_first((is_set, reason, "use optimizer: adamw"))


def import_class(source: str) -> Any:
    """Import ``module:name``, hiding the library's warnings."""
    module, _, name = source.partition(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(importlib.import_module(module), name)


def create_checked(config: TrainingConfig, make: Any) -> Any:
    """Return ``make()``, converting errors about its arguments to a ``GymError``.

    Raises:
        GymError: ``CONFIG_INVALID`` if an argument is invalid.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # GaLore and APOLLO warn about their own AdamW
            return make()
    except (TypeError, ValueError, AssertionError) as error:
        reason = f"optimizer_args: {config.optimizer} rejects them: {error}"
        raise GymError(ErrorCode.CONFIG_INVALID, reason, "correct or remove them") from error


def refuse_adapters(config: TrainingConfig, why: str) -> None:
    """Refuse to train an adapter with an optimiser that needs whole weights."""
    is_adapter = TUNING.type_of(config.finetuning).is_adapter
    reason = f"optimizer: {config.optimizer} {why}; finetuning is {config.finetuning}"
    refuse_first((is_adapter, reason, "use finetuning: full or freeze, or another optimizer"))


def split(model: Any, config: TrainingConfig) -> list[tuple[str, Any, float]]:
    """Return the name, parameter and weight decay of each trainable weight; norms and biases have no decay."""
    from torch import nn
    from transformers.trainer_pt_utils import get_parameter_names

    # The same patterns as in transformers.
    excluded = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decayed = set(get_parameter_names(model, [nn.LayerNorm], excluded))
    return [
        (name, value, config.weight_decay if name in decayed else 0.0)
        for name, value in model.named_parameters()
        if value.requires_grad
    ]


def hidden_matrices(model: Any) -> set[int]:
    """Return the ``id`` of the weight of every linear layer except the output head."""
    from torch import nn

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    return {id(module.weight) for module in linear if module is not head}


def hidden_groups(model: Any, config: TrainingConfig) -> dict[tuple[bool, float], list[Any]]:
    """Group trainable weights by ``(is in hidden_matrices, weight decay)``."""
    hidden = hidden_matrices(model)
    groups: dict[tuple[bool, float], list[Any]] = {}
    for _, value, decay in split(model, config):
        groups.setdefault((id(value) in hidden, decay), []).append(value)
    return groups


def parameter_groups(model: Any, config: TrainingConfig) -> list[dict[str, Any]]:
    """Group trainable weights by decay and, under LoRA+, also by learning rate."""
    if config.lora is not None and config.lora.loraplus_lr_ratio is not None:
        return _loraplus(model, config, config.lora.loraplus_lr_ratio)
    groups: dict[float, list[Any]] = {config.weight_decay: [], 0.0: []}
    for _, value, decay in split(model, config):
        groups[decay].append(value)
    return [{"params": values, "weight_decay": decay} for decay, values in groups.items() if values]


class _Groups:
    """Used in place of an optimiser class to record the groups that PEFT builds."""

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
