"""LoftQ: initialises the adapter with the error of quantising the base to 4 bits. PEFT's version needs CUDA.

Li et al. 2023, "LoftQ: LoRA-Fine-Tuning-Aware Quantization for Large Language Models", algorithm 1: with A0 = B0 = 0,
``Q_t = quantise(W - B_{t-1} A_{t-1})`` and ``B_t, A_t = SVD_r(W - Q_t)``, T times.
"""

from __future__ import annotations

from typing import Any

import torch

from gym_fed.config.train.training import TrainingConfig
from gym_fed.training.tuning._starts import lora_layers, remember_start


@torch.no_grad()
def start_from_loss(model: Any, config: TrainingConfig) -> None:
    """Set the factors of every quantised LoRA layer, and its 4-bit weights where ``loftq_iter`` is above 1.

    Args:
        model: A PEFT model on a base that ``quantization`` holds in 4 bits.
        config: Names the base, which is read once more in full precision.
    """
    from gym_fed.base.models import load_model

    assert config.lora is not None
    assert config.model is not None  # quantised by name
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
            layer.lora_magnitude_vector["default"].update_layer(
                base_layer=base, lora_A=a, lora_B=b, scaling=scale
            )


def loftq(
    weight: torch.Tensor, like: Any, rank: int, iterations: int
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Run algorithm 1 on one weight.

    Args:
        weight: W ``[out, in]``.
        like: ``bitsandbytes.nn.Params4bit`` that holds W already, and has the settings of quantisation.
        rank: Of the factors.
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
        kept = min(rank, s.numel())
        root = s[:kept].sqrt()
        a = torch.zeros(rank, weight.shape[1], device=weight.device)
        b = torch.zeros(weight.shape[0], rank, device=weight.device)
        a[:kept], b[:, :kept] = root[:, None] * v[:kept], u[:, :kept] * root
    return quantised, a, b
