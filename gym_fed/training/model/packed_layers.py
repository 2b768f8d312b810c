"""Quantise the linear layers of a loaded model to 2 to 8 bits with HQQ or torchao, to train an adapter on them.

Badri and Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models". torchao rounds to nearest.
"""

from __future__ import annotations

from typing import Any

from gym_fed.base.models import pick_device
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError

_MARK = "packed_by"


def packed_by(model: Any) -> str | None:
    """Return the method by which ``pack_layers`` quantised a model; None for any other model."""
    method = getattr(model, _MARK, None)
    return method if isinstance(method, str) else None


def pack_layers(model: Any, config: TrainingConfig) -> Any:
    """Quantise every linear layer except the head, in place, if ``quantization`` specifies HQQ or torchao.

    Raises:
        GymError: ``CONFIG_INVALID`` with a layer whose rows are not a multiple of ``group_size``.
    """
    settings = config.quantization
    if settings is None or settings.method == "bitsandbytes":
        return model
    layers = linear_layers(model)
    for name, layer in layers.items():
        if layer.in_features % settings.group_size:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"quantization.group_size: {settings.group_size} does not divide {name}'s {layer.in_features} inputs",
                "set a smaller one, such as 32",
            )
    model.requires_grad_(False)
    model.to(pick_device(config.device))
    quantise = _by_hqq if settings.method == "hqq" else _by_torchao
    quantise(model, list(layers), settings.bits, settings.group_size)
    setattr(model, _MARK, settings.method)
    return model


def linear_layers(model: Any) -> dict[str, Any]:
    """Return the linear layers of a model by name, except its head."""
    import torch

    head = model.get_output_embeddings()
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }


def packed_names(model: Any) -> list[str]:
    """Return the names of HQQ's layers, which PEFT does not count among ``all-linear``."""
    return [name for name, module in model.named_modules() if type(module).__name__ == "HQQLinear"]


def _by_hqq(model: Any, names: list[str], bits: int, group_size: int) -> None:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    for name in names:
        layer = model.get_submodule(name)
        weight, config = layer.weight, BaseQuantizeConfig(nbits=bits, group_size=group_size)
        packed = HQQLinear(layer, config, compute_dtype=weight.dtype, device=str(weight.device))
        model.set_submodule(name, packed)


def _by_torchao(model: Any, names: list[str], bits: int, group_size: int) -> None:
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, PerGroup, quantize_

    config = IntxWeightOnlyConfig(weight_dtype=getattr(torch, f"int{bits}"), granularity=PerGroup(group_size))
    chosen = set(names)
    quantize_(model, config, filter_fn=lambda _module, name: name in chosen)
