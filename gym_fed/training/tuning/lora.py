"""LoRA on a model in memory: wrapping it, and reading its factors under the base model's parameter names."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gym_fed.config.training import LoraSettings, TrainingConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.training.tuning.base import Tuning

LoraFactors = dict[str, tuple[torch.Tensor, torch.Tensor, float]]


class Lora(Tuning):
    """Two factors beside each linear layer, Hu et al. 2021."""

    def prepare(self, model: Any, config: TrainingConfig) -> Any:
        assert config.lora is not None  # filled in by the config
        return add_lora(model, config.lora, seed=config.seed)


def add_lora(model: Any, settings: LoraSettings, *, seed: int) -> Any:
    """Wrap ``model`` for LoRA; its own weights are frozen and stay shared with the wrapper.

    Args:
        model: A ``transformers`` causal LM.
        settings: Rank, scale and targets.
        seed: Decides the random A factors (B starts at zero). With ``settings.freeze_a`` they follow from it and the
            layer's name alone, whoever trains and on whatever machine, and are not trained.

    Raises:
        GymError: ``CONFIG_INVALID`` when ``target_modules`` names no layer of the model.
    """
    from peft import LoraConfig, get_peft_model
    from transformers import set_seed

    set_seed(seed)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.r,
        lora_alpha=settings.lora_alpha,
        lora_dropout=settings.lora_dropout,
        target_modules=settings.target_modules,
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"lora.target_modules: {settings.target_modules!r} fits no layer of {type(model).__name__}",
            "use all-linear, or names such as q_proj and v_proj",
        ) from error
    if settings.freeze_a:
        _freeze_a(adapted, seed)
    return adapted


def frozen_factor(seed: int, name: str, rank: int, width: int) -> torch.Tensor:
    """The A ``[rank, width]`` float32 that everyone draws for a layer: uniform within ``1 / sqrt(width)``, as PEFT's.

    Its bits are SHAKE-256 of seed and name, so that no library's generator decides whether two contributors agree.
    Sun et al. 2024, "Improving LoRA in Privacy-preserving Federated Learning" (FFA-LoRA).
    """
    stream = hashlib.shake_256(f"frozen A\n{seed}\n{name}".encode()).digest(4 * rank * width)
    fractions = (np.frombuffer(stream, "<u4") >> 8).astype(np.float32) * np.float32(2.0**-23) - np.float32(
        1.0
    )
    return torch.from_numpy(fractions * np.float32(1.0 / math.sqrt(width))).reshape(rank, width)


def _freeze_a(model: Any, seed: int) -> None:
    from peft.tuners.lora import LoraLayer

    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            module: Any = layer
            for factor in module.lora_A.values():
                with torch.no_grad():
                    factor.weight.copy_(frozen_factor(seed, name, *factor.weight.shape))
                factor.weight.requires_grad_(False)


def lora_factors(model: Any) -> LoraFactors:
    """The trained factors of a PEFT model's active LoRA adapter.

    Args:
        model: A ``peft.PeftModel`` with LoRA layers on linear modules.

    Returns:
        For each adapted weight, keyed by the base model's parameter name (``model.layers.0.self_attn.q_proj.weight``):
        ``(A [r, in], B [out, r], scaling)``, so that the weight's delta is ``scaling * B @ A``.

    Raises:
        GymError: ``MODEL_INVALID`` when there are no LoRA layers.
    """
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    factors: LoraFactors = {}
    for name, layer in base.named_modules():
        if isinstance(layer, LoraLayer) and layer.lora_A:
            module: Any = layer
            adapter = module.active_adapters[0]
            factors[f"{name}.weight"] = (
                module.lora_A[adapter].weight.detach(),
                module.lora_B[adapter].weight.detach(),
                float(module.scaling[adapter]),
            )
    if not factors:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{type(model).__name__} has no LoRA layers",
            "train with finetuning: lora",
        )
    return factors


def save_adapter(model: Any, folder: Path, base_name: str | None) -> None:
    """Write the adapter as PEFT does, naming its base so that it can be loaded anywhere the base is."""
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    if base_name is not None:
        file = folder / "adapter_config.json"
        values = json.loads(file.read_text(encoding="utf-8"))
        values["base_model_name_or_path"] = base_name
        file.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
