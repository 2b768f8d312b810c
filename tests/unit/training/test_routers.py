"""Routers of a mixture of experts get no adapter unless they are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Llama4TextConfig, PhimoeConfig, Qwen2MoeConfig

from gym_fed.config.train.tuning import LoraSettings
from gym_fed.modeling.routers import router_names
from gym_fed.training.tuning.lora import add_lora

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Any] = {
    "router of Llama 4": Llama4TextConfig(
        **SIZES, num_local_experts=4, intermediate_size_mlp=64, head_dim=8, moe_layers=[0, 1]
    ),
    "router of Phi-MoE": PhimoeConfig(**SIZES, num_local_experts=4),
    "shared_expert_gate of Qwen2-MoE": Qwen2MoeConfig(
        **SIZES,
        num_experts=4,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        decoder_sparse_step=1,
    ),
}


@pytest.mark.parametrize("what", CONFIGS)
def test_all_linear_leaves_routers_out_and_the_model_trains(what: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[what])
    router = what.partition(" ")[0]
    assert router_names(model) == [router]
    adapted = add_lora(model, LoraSettings(r=2), seed=0)
    ids = torch.arange(3, 13)[None]
    adapted(input_ids=ids, labels=ids).loss.backward()
    trained = [name for name, value in adapted.named_parameters() if value.requires_grad]

    assert trained
    assert not any(f".{router}." in name for name in trained)


def test_a_router_that_is_named_gets_its_adapter() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["shared_expert_gate of Qwen2-MoE"])
    adapted = add_lora(model, LoraSettings(r=2, target_modules=["shared_expert_gate"]), seed=0)

    assert any("shared_expert_gate.lora_A" in name for name, _ in adapted.named_parameters())
