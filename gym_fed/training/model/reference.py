"""Build the reference model of a loss: a copy of the policy before training, or the model that the config specifies."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.adapter_base import require_base
from gym_fed.base.modeling.adapters import Adapter, in_order, load_on, merge_adapters, merged, read_adapter
from gym_fed.base.models import folder_here, load_model, quiet_loading, resolve
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import ALGORITHMS
from gym_fed.core.text import counted
from gym_fed.training.model.packed_layers import pack_layers
from gym_fed.training.model.quantization import quantization_arguments


def check_reference(config: TrainingConfig) -> None:
    """Refuse ``reference_model`` and ``reference_adapter`` if the loss would not use them."""
    if not has_named_reference(config):
        return
    key = "reference_model" if config.reference_model else "reference_adapter"
    algorithm, strategy = config.algorithm, config.distributed_strategy
    has_no_weight = getattr(config.chosen_sections().get(algorithm), "beta", None) == 0
    refuse_first(
        (
            not ALGORITHMS.type_of(algorithm).takes_reference,
            f"{algorithm} does not use a reference model",
            lambda: (
                f"remove it; algorithms with a reference: {', '.join(ALGORITHMS.own_with('takes_reference'))}"
            ),
        ),
        (
            has_no_weight,
            f"{algorithm}.beta is 0, so the reference is not used",
            f"set {algorithm}.beta, or remove {key}",
        ),
        (
            strategy != "ddp",
            f"distributed.strategy {strategy} can shard only one model",
            "use ddp, or remove it",
        ),
        prefix=f"{key}: ",
    )
    resolve(_base_of(config))
    adapters = _adapters(config)
    several = (
        "reference_adapter: several adapters cannot be merged into quantised weights (quantization is set)"
    )
    too_many = config.quantization and len(adapters) > 1
    refuse_first((too_many, several, "use one, or merge them first with: gym export"))
    for adapter in adapters:
        own = folder_here(adapter.base)
        require_base(adapter, _base_of(config), (own, Path(resolve(_base_of(config)))))


def has_named_reference(config: TrainingConfig) -> bool:
    """Return True if the config specifies a reference."""
    return config.reference_model is not None or bool(config.reference_adapter)


def named_reference(config: TrainingConfig, policy: Any) -> Any | None:
    """Load the reference that the config specifies, frozen and on the policy's device; None if it specifies none.

    Raises:
        GymError: ``CONFIG_INVALID`` if its vocabulary differs from the policy's; errors from ``load_model``.
    """
    if not has_named_reference(config):
        return None
    name = _base_of(config)
    loaded = load_model(name, dtype=config.loaded_dtype, arguments=quantization_arguments(config))
    model = merged(loaded.model, name)
    adapters = _adapters(config)
    with quiet_loading():
        if config.quantization is not None and adapters:
            model = load_on(model, adapters[0]).get_base_model()
        else:
            model = merge_adapters(model, adapters)
    sizes = [int(lm.get_input_embeddings().weight.shape[0]) for lm in (model, policy)]
    reason = f"reference_model: {name} has {counted(sizes[0], 'token')}, but the policy has {sizes[1]}"
    refuse_first((sizes[0] != sizes[1], reason, "use a model with the policy's tokenizer"))
    model = pack_layers(model, config)
    if config.quantization is None:
        model = model.to(next(policy.parameters()).device)
    return model.requires_grad_(False).eval()


def copy_at_start(policy: Any) -> Any:
    """Return a frozen copy of ``policy``; for a PEFT model, the copy shares the untrained weights."""
    if not hasattr(policy, "peft_config"):
        return copy.deepcopy(policy).requires_grad_(False).eval()
    shared = {id(weight): weight for weight in policy.parameters() if not weight.requires_grad}
    return copy.deepcopy(policy, shared).get_base_model().requires_grad_(False).eval()


def _base_of(config: TrainingConfig) -> str:
    name = config.reference_model or config.model
    if name is None:
        reason = "reference_adapter: model is required, but not set"
        raise GymError(ErrorCode.CONFIG_INVALID, reason, "set model")
    return name


def _adapters(config: TrainingConfig) -> list[Adapter]:
    return in_order([read_adapter(name, Path(resolve(name))) for name in config.reference_adapter])
