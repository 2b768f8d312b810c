"""Tiny random models of many classes, with norms, biases and state parameters away from their first values."""

from __future__ import annotations

from typing import Any

import torch

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_N = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128, "rotary_dim": 4}
_DEEPSEEK = {
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}

CLASSES: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3_5Text": _LINEAR,
    "Qwen3_5MoeText": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "Lfm2Moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 4,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "FalconH1": _MAMBA,
    "RecurrentGemma": {"lru_width": 32, "attention_window_size": 16, "num_hidden_layers": 3},
    "StableLm": {"partial_rotary_factor": 0.5},
    "Falcon": {"head_dim": None},
    "Mamba": {"state_size": 4},
    "Mamba2": {"state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 8},
    "FalconMamba": {"state_size": 4},
    "Bloom": {"n_layer": 2, "n_head": 4},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "GPTJ": _N,
    "Zamba2": {
        "mamba_d_state": 8,
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "attention_head_dim": 16,
        "hybrid_layer_ids": [1],
        "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1,
    },
    "Bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "NemotronH": {
        "layers_block_type": ["mamba", "attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "Rwkv": {"attention_hidden_size": 32, "context_length": 128, "rescale_every": 1},
    "OlmoHybrid": _LINEAR,
    "MiniMax": {**_EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
    "GraniteMoeHybrid": {
        **_MAMBA,
        **_EXPERTS,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 16,
    },
    "GPTNeo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 8,
    },
    "GPTBigCode": _N,
    "CodeGen": _N,
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "XGLM": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
    "BioGpt": {},
    "Bert": {"is_decoder": True},
    "Whisper": {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
    },
    "CTRL": {**_N, "dff": 48},
    "OpenAIGPT": _N,
    "Llama4Text": {**_EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
    "Mixtral": _EXPERTS,
    "Qwen3Moe": _EXPERTS,
    "Olmoe": _EXPERTS,
    "DeepseekV2": {**_EXPERTS, **_DEEPSEEK},
    "DeepseekV3": {**_EXPERTS, **_DEEPSEEK},
    "Glm4Moe": {**_EXPERTS, **_DEEPSEEK, "num_key_value_heads": 2},
    "GptOss": {**_EXPERTS, "sliding_window": 8},
    "KimiLinear": {
        **_EXPERTS,
        **{key: value for key, value in _DEEPSEEK.items() if key != "n_routed_experts"},
        "layer_types": ["linear_attention", "full_attention"],
    },
}
"""The settings of each class beside the common ones."""


def build(kind: str, **changes: Any) -> Any:
    """A random model of a class of ``CLASSES``."""
    import transformers

    torch.manual_seed(0)
    settings = {**_COMMON, **CLASSES.get(kind, {}), **changes}
    # None leaves out a key that the class computes itself.
    settings = {key: value for key, value in settings.items() if value is not None}
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model
