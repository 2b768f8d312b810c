"""Initialise LoRA from the base's weights, by PiSSA, OLoRA or LoftQ; PiSSA and OLoRA become plain LoRA at the end.

PiSSA and OLoRA train ``W' + s B A`` with ``W' = W - s B0 A0`` (Meng et al. 2024, equation 5; Büyükakyüz
2024). That equals ``W + s [B, -B0] [A; A0]``: an ordinary adapter of twice the rank on the original W.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gym_fed.config.train.training import TrainingConfig

_ATTRIBUTE = "_gym_lora_start"


@dataclass
class _Start:
    """The initial state of one layer.

    Attributes:
        weight: The original weight of the base, on the CPU; None if it is unchanged (LoftQ, whose base stays
            quantised).
        a: A0, ``[r, in]``.
        b: B0, ``[out, r]``.
    """

    weight: torch.Tensor | None
    a: torch.Tensor
    b: torch.Tensor


def keeping_originals(model: Any, wrap: Callable[[], Any]) -> Any:
    """Wrap the model, and store CPU copies of the weights that wrapping changes."""
    before = {
        id(module): module.weight.detach().to("cpu", copy=True)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
    }
    adapted = wrap()
    for layer in lora_layers(adapted):
        remember_start(layer, before[id(layer.get_base_layer())])
    # An adapter that a trainer adds later, such as a frozen copy, must not change the base again.
    adapted.peft_config["default"].init_lora_weights = True
    return adapted


def remember_start(layer: Any, weight: torch.Tensor | None) -> None:
    """Store the initial factors of ``layer``."""
    a, b = (factor["default"].weight.detach().clone() for factor in (layer.lora_A, layer.lora_B))
    setattr(layer, _ATTRIBUTE, _Start(weight, a, b))


def lora_layers(model: Any) -> Iterator[Any]:
    """Yield every layer of ``model`` that has a LoRA adapter named default."""
    from peft.tuners.lora import LoraLayer

    for module in model.modules():
        if isinstance(module, LoraLayer) and "default" in module.lora_A:
            yield module


@torch.no_grad()
def to_plain_lora(model: Any) -> None:
    """Restore the base's weights, and append the initial factors to the adapter. Plain LoRA is not changed.

    A quantised base is not restored; ``start_subtracted`` handles it when the adapter is saved.
    """
    starts: list[tuple[Any, _Start]] = [
        (layer, start) for layer, start in _starts(model) if start.weight is not None
    ]
    if not starts:
        return
    for name in [name for name in model.peft_config if name != "default"]:
        model.delete_adapter(name)  # a copy of the initial adapter, which belongs to the changed base
    for layer, start in starts:
        layer.get_base_layer().weight.copy_(start.weight)
        _append(layer, start)
        delattr(layer, _ATTRIBUTE)
    double(model.peft_config["default"])


def _starts(model: Any) -> list[tuple[Any, _Start]]:
    """Return the layers that have a separate initial state, with that state."""
    return [(layer, getattr(layer, _ATTRIBUTE)) for layer in lora_layers(model) if hasattr(layer, _ATTRIBUTE)]


@contextmanager
def start_subtracted(model: Any) -> Iterator[None]:
    """Convert an adapter on a quantised base to one for the original base within a context, to save it."""
    starts = _starts(model)
    if not starts:
        yield
        return
    trained = [(layer, layer.lora_A["default"], layer.lora_B["default"]) for layer, _ in starts]
    config = model.peft_config["default"]
    model.peft_config["default"] = copy.deepcopy(config)
    double(model.peft_config["default"])
    for layer, start in starts:
        _append(layer, start)
    try:
        yield
    finally:
        model.peft_config["default"] = config
        for layer, a, b in trained:
            layer.lora_A["default"], layer.lora_B["default"] = a, b
            layer.r["default"] //= 2
            layer.lora_alpha["default"] /= 2


def double(config: Any) -> None:
    """Update the ``LoraConfig`` of an adapter whose rank was doubled at the same scale."""
    factor = math.sqrt(2) if config.use_rslora else 2
    config.r *= 2
    config.lora_alpha *= factor
    config.rank_pattern = {name: 2 * rank for name, rank in config.rank_pattern.items()}
    config.alpha_pattern = {name: alpha * factor for name, alpha in config.alpha_pattern.items()}


def _append(layer: Any, start: _Start) -> None:
    """Replace A and B by ``[A; A0]`` and ``[B, -B0]``."""
    for factors, first, dimension in ((layer.lora_A, start.a, 0), (layer.lora_B, -start.b, 1)):
        old = factors["default"].weight
        joined = torch.cat([old, first.to(old)], dim=dimension)
        linear = torch.nn.Linear(joined.shape[1], joined.shape[0], bias=False, device="meta")
        linear.weight = torch.nn.Parameter(joined, requires_grad=old.requires_grad)
        factors["default"] = linear
    layer.r["default"] *= 2
    layer.lora_alpha["default"] *= 2


@torch.no_grad()
def start_from_loss(model: Any, config: TrainingConfig) -> None:
    """Initialise the LoRA layers of a quantised model by LoftQ, on any device; PEFT's version needs CUDA.

    Args:
        model: A PEFT model on a base that ``quantization`` has reduced to 4 bits.
        config: The run's config. It names the base, which is loaded again in full precision.
    """
    from gym_fed.base.models import load_model

    assert config.lora is not None
    assert config.model is not None  # the base is quantised by name
    originals = load_model(config.model).model
    names = {id(module): name for name, module in model.get_base_model().named_modules()}
    for layer in lora_layers(model):
        base = layer.get_base_layer()
        weight = originals.get_submodule(names[id(layer)]).weight.to(base.weight.device)
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
        scale = float(layer.scaling["default"])
        quantised, start_a, start_b = loftq(weight, base.weight, a.shape[0], config.lora.loftq_iter)
        a.copy_(start_a)
        b.copy_(start_b / scale)
        base.weight = quantised
        remember_start(layer, None)
        if config.lora.use_dora:
            magnitudes = layer.lora_magnitude_vector["default"]
            magnitudes.update_layer(base_layer=base, lora_A=a, lora_B=b, scaling=scale)


def loftq(
    weight: torch.Tensor, like: Any, rank: int, iterations: int
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Run LoftQ (Li et al. 2023, "LoftQ: LoRA-Fine-Tuning-Aware Quantization", algorithm 1) on one weight.

    With ``A_0 = B_0 = 0``: ``Q_t = quantise(W - B_{t-1} A_{t-1})`` and ``B_t, A_t = SVD_r(W - Q_t)``, T times.

    Args:
        weight: W ``[out, in]``.
        like: A ``bitsandbytes.nn.Params4bit`` of W, which has the quantisation settings.
        rank: Rank of the factors.
        iterations: T.

    Returns:
        ``(Q, A [rank, in], B [out, rank])``, Q as ``Params4bit`` and both factors float32.
    """
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn.modules import Params4bit

    weight = weight.float()
    quantised: Any = like
    a = b = torch.zeros(0)
    for turn in range(iterations):
        if turn:
            again: Any = Params4bit(
                (weight - b @ a).to(like.quant_state.dtype).cpu(),
                requires_grad=False,
                quant_type=like.quant_type,
                compress_statistics=like.compress_statistics,
                blocksize=like.blocksize,
                quant_storage=like.quant_storage,
            )
            quantised = again.to(weight.device)
        lost = weight - dequantize_4bit(quantised.data, quantised.quant_state).float()
        u, s, v = torch.linalg.svd(lost, full_matrices=False)
        num_kept = min(rank, s.numel())
        root = s[:num_kept].sqrt()
        a = torch.zeros(rank, weight.shape[1], device=weight.device)
        b = torch.zeros(weight.shape[0], rank, device=weight.device)
        a[:num_kept], b[:, :num_kept] = root[:, None] * v[:num_kept], u[:, :num_kept] * root
    return quantised, a, b
