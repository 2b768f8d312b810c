"""Tiny random models of any causal architecture of transformers, with settings at which a wrong head or mask shows."""

from __future__ import annotations

from typing import Any

VOCABULARY = 96
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    **dict.fromkeys(("hidden_size", "n_embd", "word_embed_proj_dim", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "mamba_d_ssm"), 128),
    **dict.fromkeys(("shared_expert_intermediate_size", "lru_width", "attention_hidden_size"), 128),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 128),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16
    ),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_d_state", "state_size", "ssm_state_size"), 16),
    "time_step_rank": 4,
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 16),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SCALES: dict[str, Any] = {
    **dict.fromkeys(("logit_scale", "output_multiplier", "lm_head_multiplier"), 0.3),
    "logits_scaling": 3.0,
    **dict.fromkeys(("final_logit_softcapping", "logits_soft_cap"), 0.5),
    "router_aux_loss_coef": 0.3,
    "output_router_logits": True,
    "attn_logit_softcapping": 2.0,
    "attention_multiplier": 0.2,
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 6),
}
"""Scales and caps of logits, routers' losses, and windows shorter than a few rows together."""
_LATENT = {"num_key_value_heads": 4, "head_dim": None}
_OWN: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_LATENT, "first_k_dense_replace": 1, "n_group": 2},
    "deepseek_v3": {**_LATENT, "first_k_dense_replace": 1},
    "falcon": {"head_dim": None, "alibi": False},
    "gptj": {"rotary_dim": 8},
    "jamba": {"layer_types": None, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"head_dim": 16, "num_heads": 8, "n_groups": 1},
    "recurrent_gemma": {"layer_types": None, "block_types": ["recurrent", "attention"]},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention"]},
}
"""By model type; None leaves the config's default."""


def tiny_config(model_type: str, **changes: Any) -> Any:
    """A ``transformers`` config of two layers, or of one layer of each kind."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[model_type]
    default = made()
    values = {key: value for key, value in {**_SIZES, **_SCALES}.items() if hasattr(default, key)}
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if len(kinds) > 1:
        values |= {"layer_types": kinds, "num_hidden_layers": len(kinds)}
    values |= {**_OWN.get(model_type, {}), **changes}
    return made(**{key: value for key, value in values.items() if value is not None})


def tiny_model(model_type: str, **changes: Any) -> Any:
    """A model of ``tiny_config``, the same one at every call, with weights large enough to distinguish tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    config = tiny_config(model_type, **changes)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn_like(weight) * 0.05)
    return model


def rows_of_ids(*lengths: int) -> list[Any]:
    """Rows of random ids, ``[1, length]`` each."""
    import torch

    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (1, length), generator=draw) for length in lengths]


def gradients(model: Any) -> dict[str, Any]:
    """The gradients of all trained weights, which are then cleared; zeros where there are none."""
    import torch

    found = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in model.named_parameters()
        if weight.requires_grad
    }
    model.zero_grad()
    return found


def farthest(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of two sets of gradients, as a share of each tensor's largest entry."""
    assert one.keys() == other.keys()
    return max(
        float((one[name] - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-4)) for name in one
    )
