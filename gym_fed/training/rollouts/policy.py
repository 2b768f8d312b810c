"""Prepare the trained adapter for vLLM, and refuse configs for which vLLM's answers would not be the policy's."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import TUNING
from gym_fed.serving.vllm.bodies import require_supported
from gym_fed.serving.vllm.connection import TARGETS
from gym_fed.serving.vllm_plugin.uploads import CONFIG_KEY
from gym_fed.training.processes.ranks import world_size

_MAX_RANK = 512
_REMEDY = "change it, or remove {} to generate in this process"


@dataclass(frozen=True)
class RolloutPolicy:
    """A snapshot of the trained adapter.

    Attributes:
        name: Name in vLLM. It is never reused for another state, since it is a key of vLLM's prefix cache.
        version: Number of optimiser steps before this state.
        content: A safetensors file with PEFT's config in its metadata.
    """

    name: str
    version: int
    content: bytes


def adapter_file(model: Any) -> bytes:
    """Return the trained adapter of a PEFT model as the bytes that ``vllm_plugin.uploads`` accepts."""
    from peft import get_peft_model_state_dict
    from safetensors.torch import save

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    config = model.peft_config["default"].to_dict()
    # JSON has no sets, and paths on this machine must not leave it.
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
    plain["base_model_name_or_path"] = None
    tensors = {name: value.detach().cpu().contiguous() for name, value in state.items()}
    return save(tensors, metadata={"format": "pt", CONFIG_KEY: json.dumps(plain, sort_keys=True)})


def rank_for_vllm(model: Any) -> int:
    """Return the smallest ``--max-lora-rank`` for which vLLM accepts a PEFT model's adapter.

    Raises:
        GymError: ``MODEL_INVALID`` with a module that vLLM cannot adapt; ``CONFIG_INVALID`` if the rank is too high.
    """
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    rank: int = max(value.shape[0] for name, value in state.items() if ".lora_A." in name)
    for name in state:
        module = name.rpartition(".lora_")[0]
        if module.rpartition(".")[2] not in TARGETS:
            raise GymError(
                ErrorCode.MODEL_INVALID,
                f"rollouts: vLLM does not support an adapter for {module or name}",
                f"set lora.target_modules to some of {', '.join(TARGETS)}, or remove rollouts",
            )
    if rank > _MAX_RANK:
        raise GymError(ErrorCode.CONFIG_INVALID, f"lora.r: {rank} is over vLLM's maximum {_MAX_RANK}")
    return max(8, 1 << (rank - 1).bit_length())


def check_rollouts(name: str, settings: Any, config: TrainingConfig) -> None:
    """Refuse a config whose policy vLLM cannot reproduce exactly.

    Args:
        name: The name of the algorithm's section.
        settings: The section, with ``rollouts``.
        config: The run's config.

    Raises:
        GymError: ``CONFIG_INVALID`` with the key and the remedy.
    """
    from gym_fed.serving.engine.request import SamplingParams

    tuning = TUNING.type_of(config.finetuning)
    lora = config.lora if tuning.sends_factors else None
    key = f"{name}.rollouts"
    if lora is None:
        reason = (
            f"{key}: finetuning: {config.finetuning} trains weights that vLLM would not receive; use lora"
        )
        raise GymError(ErrorCode.CONFIG_INVALID, reason, _REMEDY.format(key))
    processes = world_size()
    changes_base = not tuning.starts_as_base(config)
    merges = len(config.adapter) > 1 or (bool(config.adapter) and config.new_adapter)
    spikes, ahead = config.loss_spikes, settings.rollouts.max_staleness
    refuse_first(
        (lora.use_dora, "lora.use_dora: vLLM does not support DoRA"),
        (lora.bias != "none", f"lora.bias: {lora.bias} trains biases, which vLLM does not support"),
        (bool(lora.modules_to_save), "lora.modules_to_save: vLLM does not support whole modules"),
        (bool(lora.target_parameters), "lora.target_parameters: vLLM does not support LoRA of parameters"),
        (changes_base, "lora.init_lora_weights changes the base, which vLLM would not receive"),
        (config.quantization is not None, "quantization: vLLM's base is not quantised in the same way"),
        (config.rope_scaling is not None, "rope_scaling changes the base, which vLLM would not receive"),
        (merges, "adapter: a merged adapter changes the base, which vLLM would not receive"),
        (config.model is None, "model: vLLM needs its name or folder"),
        (config.auto_batch_size is not None, "auto_batch_size would need answers for every size that it tries"),
        (
            bool(ahead) and spikes is not None and spikes.rollback,
            "loss_spikes.rollback changes the order of prompts, but max_staleness requests them in advance",
        ),
        (processes > 1, f"{processes} processes: rollouts support only one process"),
        prefix=f"{key}: ",
        remedy=_REMEDY.format(key),
    )  # fmt: skip
    try:
        require_supported(SamplingParams(temperature=settings.temperature))
    except GymError as error:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{name}.{error.message}", "change it") from error
