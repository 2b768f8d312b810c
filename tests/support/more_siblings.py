"""Siblings of the further classes that LLaMA-Factory's example files name, and of bases that are quantised on disk.

``make_sibling(kind, folder)`` takes these kinds beside those of ``siblings``. ``awq`` and ``gptq`` have packed weights;
``aqlm`` has the config and the name of one, and plain weights: it is for what is refused before weights are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support import siblings
from tests.support.packed_weights import pack_layers
from tests.support.siblings import SIBLINGS
from tests.support.siblings.family import Ids, Sibling
from tests.support.siblings.templates import shipped

_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "output_router_logits": False}
_LATENT = {
    **{"kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 8, "n_shared_experts": 1, "n_routed_experts": 8, "first_k_dense_replace": 1},
    **{"norm_topk_prob": True, "num_key_value_heads": 4, "attention_bias": False},
}
_QUANTIZED = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "aqlm": {
        **{"quant_method": "aqlm", "in_group_size": 8, "out_group_size": 1, "num_codebooks": 1},
        **{"nbits_per_codebook": 16, "linear_weights_not_to_quantize": ["lm_head.weight"]},
    },
}


def _qwen3_vl_moe(ids: Ids) -> dict[str, Any]:
    values = SIBLINGS["qwen3_vl"].config(ids)
    text = {
        **values["text_config"],
        **_EXPERTS,
        **{"model_type": "qwen3_vl_moe_text", "num_experts": 8, "decoder_sparse_step": 1},
        **{"mlp_only_layers": [], "norm_topk_prob": True},
    }
    vision = {**values["vision_config"], "model_type": "qwen3_vl_moe"}
    names = {
        "model_type": "qwen3_vl_moe",
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "tie_word_embeddings": False,
    }
    return {**values, **names, "text_config": {**text, "tie_word_embeddings": False}, "vision_config": vision}


def _qwen3_5(moe: bool) -> Callable[[Ids], dict[str, Any]]:
    def config(ids: Ids) -> dict[str, Any]:
        values = SIBLINGS["qwen3_vl"].config(ids)
        kind = "qwen3_5_moe" if moe else "qwen3_5"
        text = {
            **values["text_config"],
            **{"model_type": f"{kind}_text", "num_hidden_layers": 4, "tie_word_embeddings": not moe},
            **{"layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_conv_kernel_dim": 4},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
            "rope_parameters": {
                **{"rope_theta": 10000000, "rope_type": "default", "partial_rotary_factor": 0.5},
                **{"mrope_section": [2, 1, 1], "mrope_interleaved": True},
            },
        }
        for key in ("rope_scaling", "rope_theta"):
            text.pop(key, None)
        if moe:
            text |= {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 16}
        vision = {**values["vision_config"], "model_type": kind}
        vision.pop("deepstack_visual_indexes")
        name = f"Qwen3_5{'Moe' if moe else ''}ForConditionalGeneration"
        top = {"model_type": kind, "architectures": [name], "tie_word_embeddings": not moe}
        return {**values, **top, "text_config": text, "vision_config": vision}

    return config


def _deepseek(version: int) -> Callable[[Ids], dict[str, Any]]:
    def config(ids: Ids) -> dict[str, Any]:
        values = SIBLINGS["deepseek"].config(ids)
        kept = {key: value for key, value in values.items() if "window" not in key and key != "rope_scaling"}
        groups = {"n_group": 1, "topk_group": 1}
        way = {"topk_method": "greedy"} if version == 2 else {"num_nextn_predict_layers": 0}
        names = {"model_type": f"deepseek_v{version}", "architectures": [f"DeepseekV{version}ForCausalLM"]}
        return {**kept, **_LATENT, **_EXPERTS, **groups, **way, **names, "tie_word_embeddings": False}

    return config


def _llama2(ids: Ids) -> dict[str, Any]:
    values = SIBLINGS["mistral"].config(ids)
    kept = {key: value for key, value in values.items() if "window" not in key}
    return {**kept, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_key_value_heads": 4}


MORE: dict[str, Sibling] = {
    "qwen3_vl_moe": replace(SIBLINGS["qwen3_vl"], hub="Qwen/Qwen3-VL-30B-A3B-Instruct", config=_qwen3_vl_moe),
    "qwen3_5": replace(
        SIBLINGS["qwen3_vl"],
        hub="Qwen/Qwen3.5-0.8B",
        config=_qwen3_5(False),
        template=shipped("qwen3_5_nothink"),
    ),
    "qwen3_5_moe": replace(
        SIBLINGS["qwen3_vl"],
        hub="Qwen/Qwen3.5-35B-A3B",
        config=_qwen3_5(True),
        template=shipped("qwen3_5_nothink"),
    ),
    "deepseek_v2": replace(SIBLINGS["deepseek"], hub="deepseek-ai/DeepSeek-V2-Lite", config=_deepseek(2)),
    "deepseek_v3": replace(
        SIBLINGS["deepseek"],
        hub="deepseek-ai/DeepSeek-V3",
        config=_deepseek(3),
        template=shipped("deepseekv3"),
    ),
    "qwen3_2507": replace(
        SIBLINGS["qwen3"], hub="Qwen/Qwen3-4B-Instruct-2507", template=shipped("qwen3_instruct_2507")
    ),
    "llama2": replace(SIBLINGS["mistral"], hub="meta-llama/Llama-2-7b", config=_llama2),
}
"""DeepSeek V2 has the template of R1's distillates here, Llama 2 that of Mistral, from which it came."""
OTHERS = ("moss_vl", *_QUANTIZED)


def make_sibling(kind: str, folder: Path, *, seed: int = 0) -> Path:
    """As ``siblings.make_sibling``, of these kinds too.

    ``moss_vl`` is of a class that transformers lacks; ``awq``, ``gptq`` and ``aqlm`` are Llama 3 quantised so.
    """
    if kind == "moss_vl":
        siblings.make_sibling("qwen3_vl", folder, seed=seed)
        _change(folder, {"model_type": "moss_vl", "architectures": ["MossVLForConditionalGeneration"]})
    elif kind in _QUANTIZED:
        siblings.make_sibling("llama3_8b", folder, seed=seed)
        _change(folder, {"quantization_config": _QUANTIZED[kind]})
        if kind != "aqlm":
            pack_layers(folder, kind, _QUANTIZED[kind]["group_size"])
    else:
        SIBLINGS.update(MORE)
        siblings.make_sibling(kind, folder, seed=seed)
    return folder


def _change(folder: Path, values: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **values}), encoding="utf-8")
