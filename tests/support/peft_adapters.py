"""Adapters that PEFT alone has written, one for each of its options."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.support.adapters import logits

ADAPTERS: dict[str, dict[str, Any]] = {
    "ranks and scales by pattern": {
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "rank_pattern": {"^model.layers.0.self_attn.q_proj": 6, r"layers\.0\.mlp\.up_proj": 2},
        "alpha_pattern": {"v_proj": 30},
    },
    "rslora by pattern": {"use_rslora": True, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"q_proj": 3}},
    "dora": {"use_dora": True},
    "regular expression": {"target_modules": r".*layers\.0\..*(q|v)_proj"},
    "all linear but one": {"target_modules": "all-linear", "exclude_modules": ["up_proj"]},
    "one layer": {"layers_to_transform": [0]},
    "bias": {"bias": "all"},
    "head saved": {"modules_to_save": ["lm_head"]},
    "embeddings and head saved": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embeddings": {"target_modules": ["q_proj", "embed_tokens"]},
    "embeddings and head tied": {
        "target_modules": ["q_proj", "embed_tokens"],
        "ensure_weight_tying": True,
    },
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "single tokens": {"trainable_token_indices": [6, 40]},
    "no task": {"task_type": None},
    "saved norms": {"modules_to_save": ["norm", "input_layernorm"]},
    "parameters": {"target_modules": [], "target_parameters": ["q_proj.weight"], "lora_alpha": 90},
    "gaussian": {"init_lora_weights": "gaussian"},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "eva": {"init_lora_weights": "eva"},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
}
"""Settings of ``LoraConfig`` by what they are about; q_proj and v_proj are adapted unless they name others.

``eva`` has random factors: PEFT computes those of the data only in ``initialize_lora_eva_weights``. ``corda`` and
``lora_ga`` need data, and PEFT's ``loftq`` needs CUDA.
"""

CONVERTED = {"pissa", "olora"}
"""Initialisations that take from the base; PEFT saves such an adapter as a plain LoRA of twice the rank."""


def made(base: Path, folder: Path, dtype: torch.dtype | None = None, **settings: Any) -> torch.Tensor:
    """Write an adapter that has learnt something, by PEFT alone; the logits of PEFT reading it back."""
    from peft import LoraConfig, PeftModel, get_peft_model

    values = {"r": 4, "lora_alpha": 9, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's advice about tied weights
        config = LoraConfig(**{**values, **settings})
        model = get_peft_model(plain(base), config)
        start: dict[str, str] = {}
        if config.init_lora_weights in CONVERTED:
            model.peft_config[
                "default"
            ].init_lora_weights = True  # as PEFT's guides do before they save the start
            model.save_pretrained(str(folder / "start"))
            model.peft_config["default"].init_lora_weights = config.init_lora_weights
            start = {"path_initial_model_for_weight_conversion": str(folder / "start")}
        torch.manual_seed(3)
        for value in model.parameters():
            if value.requires_grad:
                torch.nn.init.normal_(value, std=0.3)
                value.data = value.data if dtype is None else value.data.to(dtype)
        model.save_pretrained(str(folder), **start)
        return logits(PeftModel.from_pretrained(plain(base), str(folder)))


def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
