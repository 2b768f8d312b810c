"""Routers of experts, and weights that a Mamba mixer reads itself, get no adapter under ``all-linear``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Llama4TextConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    ZambaConfig,
)
from transformers.models.mamba.modeling_mamba import MambaMixer

from gym_fed.base.modeling.unadapted import unadapted_names
from gym_fed.config.train.tuning import LoraSettings
from gym_fed.core.errors import GymError
from gym_fed.training.tuning.lora import add_lora
from tests.support.tiny_models import tiny_model
from tools.architectures.shrinking import tiny_config

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
    "router.layer of JetMoe": AutoConfig.for_model(
        "jetmoe", **SIZES, num_local_experts=4, num_experts_per_tok=2, kv_channels=8
    ),
    "gate.wg of Hunyuan-MoE": AutoConfig.for_model(
        "hunyuan_v1_moe", **SIZES, num_experts=4, moe_topk=2, head_dim=8
    ),
    "router.gate of AFMoE": AutoConfig.for_model(
        "afmoe",
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        head_dim=8,
        num_dense_layers=1,
        num_shared_experts=1,
    ),
    "router.classifier of LongCat-Flash": AutoConfig.for_model(
        "longcat_flash",
        **{**SIZES, "num_key_value_heads": 4},
        num_layers=2,
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        expert_ffn_hidden_size=32,
        ffn_hidden_size=64,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        head_dim=8,
    ),
    "router_gate of Doge": AutoConfig.for_model(
        "doge", **SIZES, is_moe=True, num_experts=16, num_experts_per_tok=2
    ),
}
NO_LINEAR_ROUTER: dict[str, Any] = {
    "llama": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "head_dim": 8},
    "minimax": {"num_local_experts": 4, "head_dim": 8},
}


def adapted_layers(adapted: Any) -> set[str]:
    return {
        name.partition(".lora_A")[0].removeprefix("base_model.model.")
        for name, _ in adapted.named_parameters()
        if ".lora_A" in name
    }


def renamed_by_peft(adapted: Any, layers: set[str]) -> set[str]:
    """Layers that PEFT leaves out where it adapts fused experts, because their names are those of experts before."""
    if not adapted.peft_config["default"].target_parameters:
        return set()
    return {name for name in layers if name.rpartition(".")[2] in ("gate_proj", "up_proj", "down_proj")}


def linear_layers(model: Any) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}


@pytest.mark.parametrize("what", CONFIGS)
def test_all_linear_leaves_routers_out_and_the_model_trains(what: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[what])
    router = what.partition(" ")[0]
    assert unadapted_names(model) == [router]
    layers = linear_layers(model)
    routers = {name for name in layers if name.endswith(f".{router}")}
    adapted = add_lora(model, LoraSettings(r=2), seed=0)
    ids = torch.arange(3, 13)[None]
    adapted(input_ids=ids, labels=ids).loss.backward()

    assert routers
    assert not routers & adapted_layers(adapted)
    assert layers - routers - adapted_layers(adapted) <= renamed_by_peft(adapted, layers)


@pytest.mark.parametrize("kind", NO_LINEAR_ROUTER)
def test_all_linear_leaves_no_layer_out_of_a_model_without_linear_routers(kind: str) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **NO_LINEAR_ROUTER[kind]))
    layers = linear_layers(model)
    assert unadapted_names(model) == []
    adapted = adapted_layers(add_lora(model, LoraSettings(r=2), seed=0))
    assert layers <= adapted
    assert all(name in layers or ".mlp.experts" in name for name in adapted)


READ_BY_THE_MIXER = {
    "mamba": {"dt_proj", "out_proj", "x_proj"},
    "falcon_mamba": {"dt_proj", "out_proj"},
    "mamba2": {"out_proj"},
    "falcon_h1": {"out_proj"},
    "jamba": {"dt_proj"},
}
"""What the mixers of transformers multiply by without calling the layer."""


@pytest.mark.parametrize("kind", READ_BY_THE_MIXER)
def test_all_linear_leaves_out_the_weights_that_a_mamba_mixer_reads_itself(kind: str) -> None:
    model = tiny_model(kind)
    layers, names = linear_layers(model), READ_BY_THE_MIXER[kind]
    adapted = add_lora(model, LoraSettings(r=2), seed=0)
    ids = torch.arange(3, 13)[None]
    adapted(input_ids=ids, labels=ids).loss.backward()

    found = adapted_layers(adapted)
    assert {name for name in layers if name.rpartition(".")[2] in names}.isdisjoint(found)
    assert {name for name in layers if name.rpartition(".")[2] == "in_proj"} <= found
    unused = [name for name, weight in adapted.named_parameters() if "lora_B" in name and weight.grad is None]
    assert not unused


def test_all_linear_leaves_out_layers_that_share_a_weight() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(ZambaConfig))
    found = adapted_layers(add_lora(model, LoraSettings(r=2), seed=0))
    assert "model.layers.1.linear" in found
    assert not [name for name in found if ".shared_transf." in name]


def test_a_projection_that_peft_refuses_in_mamba_is_named_with_its_reason() -> None:
    with pytest.raises(GymError, match="'out_proj' is incompatible with Mamba-based models"):
        add_lora(tiny_model("mamba2"), LoraSettings(r=2, target_modules=["out_proj"]), seed=0)


def test_a_router_whose_short_name_ends_another_layers_name_is_left_out_by_its_whole_name() -> None:
    class TopKRouter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

    model = nn.ModuleDict({"experts": nn.ModuleDict({"gate": TopKRouter()})})
    model["attention"] = nn.ModuleDict({"gate": nn.ModuleDict({"layer": nn.Linear(4, 4)})})
    assert unadapted_names(model) == ["experts.gate.layer"]


def test_a_router_that_is_named_gets_its_adapter() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["shared_expert_gate of Qwen2-MoE"])
    adapted = add_lora(model, LoraSettings(r=2, target_modules=["shared_expert_gate"]), seed=0)

    assert any("shared_expert_gate.lora_A" in name for name, _ in adapted.named_parameters())


def test_the_weights_that_an_inherited_method_of_a_mixer_reads_are_left_out() -> None:
    class Mixer(MambaMixer):
        """Everything is inherited."""

    model = tiny_model("mamba")
    expected = unadapted_names(model)
    for layer in model.modules():
        if isinstance(layer, MambaMixer):
            layer.__class__ = Mixer
    assert unadapted_names(model) == expected != []


def test_a_mixer_whose_class_has_no_source_is_adapted_as_other_modules() -> None:
    class Mixer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.A_log, self.proj = nn.Parameter(torch.zeros(2)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.proj.weight

    model = nn.ModuleDict({"mixer": Mixer()})
    Mixer.__module__ = "frozen"
    for method in (Mixer.__init__, Mixer.forward):
        method.__code__ = method.__code__.replace(co_filename="frozen.py")
    assert unadapted_names(model) == []
