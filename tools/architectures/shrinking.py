"""Build a tiny config for any model class: the defaults of the class with small sizes, and a table of corrections."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

VOCABULARY = 320
"""Number of embedding rows: one per token of the tokenizer, and for the ids of image, audio and other placeholders."""
_FIRST_PLACEHOLDER = 270
PAD, BOS, EOS = 256, 257, 258
PLACEHOLDERS = {
    **dict.fromkeys(("image_token_id", "image_token_index"), 262),
    **dict.fromkeys(("video_token_id", "video_token_index"), 263),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), 264),
}
"""The first token ids that ``processors.py`` adds to the tokenizer."""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "pad_vocab_size"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "n_embd", "word_embed_proj_dim", "d_model", "embed_dim", "embedding_size", "dim_model",
            "hidden_size_global",), 64
    ),
    **dict.fromkeys(
        ("emb_dim", "projection_dim", "out_hidden_size", "output_dim", "decoder_hidden_size", "width", "embedding_dim"),
        64,
    ),
    **dict.fromkeys(
        (
            "intermediate_size", "ffn_dim", "n_inner", "moe_intermediate_size", "mamba_d_ssm", "dim_ff", "d_inner",
            "shared_expert_intermediate_size", "lru_width", "attention_hidden_size", "ffn_hidden_size", "d_ff",
            "encoder_ffn_dim", "decoder_ffn_dim", "expert_ffn_hidden_size", "shared_intermediate_size",
            "intermediate_size_mlp", "dense_intermediate_size", "moe_shared_expert_intermediate_size",
            "feed_forward_size", "moe_ffn_hidden_size", "projector_hidden_size", "dff",
            "prefix_dense_intermediate_size",
        ),
        128,
    ),
    **dict.fromkeys(
        (
            "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers", "depth",
            "num_encoder_layers", "num_decoder_layers", "num_blocks",
        ),
        2,
    ),
    **dict.fromkeys(
        (
            "num_attention_heads", "n_head", "n_heads", "attention_heads", "encoder_attention_heads",
            "decoder_attention_heads", "num_heads",
        ),
        4,
    ),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "n_kv_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "v_head_dim", "swa_v_head_dim", "attention_head_dim", "d_kv"), 16),
    "global_head_dim": 32,
    **dict.fromkeys(
        (
            "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions",
            "max_sequence_length",
        ),
        512,
    ),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts", "experts_per_token", "moe_top_k",
            "num_experts_per_token",), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 16),
    "qk_head_dim": 32,
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "first_k_dense_replace", "moe_layer_start_index"), 1),
    **dict.fromkeys(("index_n_heads", "index_topk", "index_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(
        ("mamba_d_head", "mamba_head_dim", "mamba_d_state", "state_size", "ssm_state_size", "mamba_headdim"), 16
    ),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups"), 1),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size", "local_window_size"), 8),
    "hidden_size_per_layer_input": 16,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    **dict.fromkeys(("max_source_positions",), 64),
}  # fmt: skip
"""Sizes, by their names in transformers' configs."""

_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
OVERRIDES: dict[str, dict[str, Any]] = {
    "BambaConfig": {"attn_layer_indices": [1]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "GraniteMoeHybridConfig": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "RwkvConfig": {"attention_hidden_size": 64},
    "BltConfig": {"encoder_hash_byte_group_vocab": 64},
    "CohereCompassTextConfig": {"rope_parameters": {"full_attention": _PLAIN_ROPE, "sliding_attention": _PLAIN_ROPE}},
    "DbrxConfig": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 128, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 64},
    },
    "Dots1Config": {
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64,
    },
    "Gemma3nTextConfig": {
        "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2, "num_kv_shared_layers": 0,
        "intermediate_size": [128, 128], "activation_sparsity_pattern": [0.0, 0.0],
    },
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2Config": {"head_dim": 16, "num_heads": 8},
    "NemotronConfig": {"num_key_value_heads": 2},
    "ReformerConfig": {
        "axial_pos_embds": False, "attn_layers": ["local", "lsh"], "attention_head_size": 16,
        "local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "num_buckets": 4, "num_hidden_layers": None,
    },
    "DeepseekV2Config": {"num_experts_per_tok": 2},
    "LongcatFlashConfig": {"head_dim": 16, "zero_expert_num": 2, "num_layers": 1},
    "XmodConfig": {"default_language": "en_XX"},
    "FlintConfig": {"mlp_only_layers": [0]},
    "GPTJConfig": {"rotary_dim": 8},
    "CodeGenConfig": {"rotary_dim": 8},
    "Gemma4AssistantConfig": {"text_config": {"hidden_size_per_layer_input": 0}},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32,
        "indexer_compress_ratio": 4, "hc_lowrank": 16, "ngram_vocab_size_base": 64, "ple_embed_dim": 64,
    },
    "RoCBertConfig": {
        "shape_embed_dim": 16, "shape_vocab_size": 300, "pronunciation_embed_dim": 16, "pronunciation_vocab_size": 300,
    },
    # The published models have these tokens, but the defaults of the class lack them.
    "Qwen2_5OmniThinkerConfig": {"vision_start_token_id": 280, "vision_end_token_id": 281},
    "Qwen3OmniMoeThinkerConfig": {"vision_start_token_id": 280, "vision_end_token_id": 281},
    "GraniteSpeechEncoderConfig": {"hidden_dim": 64, "dim_head": 16, "context_size": 16, "max_pos_emb": 32},
    "GraniteSpeechPlusEncoderConfig": {"hidden_dim": 64, "dim_head": 16, "context_size": 16, "max_pos_emb": 32},
    "Blip2QFormerConfig": {"encoder_hidden_size": 64},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "Step3p7TextConfig": {"sliding_window": 8},
    "Qwen3MoeConfig": {"norm_topk_prob": True},  # as in the published models
    "ZayaConfig": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "ZambaConfig": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"], "num_hidden_layers": 4,
        "attention_hidden_size": 128, "attention_head_dim": 32, "num_key_value_heads": 4,
    },
}  # fmt: skip
"""Corrections by config class, applied to every config of that class, nested ones included; None removes a key."""


def tiny_config(config_class: Any) -> Any:
    """Return a config of this class with one layer of each kind, but at least two layers."""
    return _shrunk(config_class())


def _shrunk(default: Any) -> Any:
    config_class = type(default)
    own = {key: value for key, value in vars(default).items() if not key.startswith("_")}
    values: dict[str, Any] = {key: small for key, small in SIZES.items() if type(own.get(key)) is int}
    if "head_dim" in own:
        values["head_dim"] = SIZES["head_dim"]
    for key, value in own.items():
        if "drop" in key and isinstance(value, float):
            values[key] = 0.0
        elif key in PLACEHOLDERS and type(value) is int:
            values[key] = PLACEHOLDERS[key]
        elif key.endswith(("_token_id", "_token_index")) and type(value) is int and value >= VOCABULARY:
            values[key] = _FIRST_PLACEHOLDER + len(
                [name for name in values if name.endswith(("_id", "_index"))]
            )
    if "kv_lora_rank" in own:  # with latent attention, every head has its own keys
        values["num_key_value_heads"] = SIZES["num_attention_heads"]
        values.pop("head_dim", None)
    values |= _layers(default, own)
    if (
        isinstance(rope := own.get("rope_parameters"), dict)
        and "rope_theta" in rope
        and _has_mrope(config_class)
    ):
        half = int(SIZES["head_dim"] * rope.get("partial_rotary_factor", 1.0)) // 2
        values["rope_parameters"] = {**rope, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    for key, token in (("pad_token_id", PAD), ("bos_token_id", BOS), ("eos_token_id", EOS)):
        if hasattr(default, key) and (getattr(default, key) is not None or key != "bos_token_id"):
            values[key] = token
    for key in getattr(config_class, "sub_configs", None) or ():
        if (part := getattr(default, key, None)) is not None and hasattr(part, "to_dict"):
            values[key] = _shrunk(part)
    if "is_decoder" in own:
        values["is_decoder"] = True
    if getattr(default, "tie_word_embeddings", None) is not None:
        values.setdefault("tie_word_embeddings", default.tie_word_embeddings)
    values |= OVERRIDES.get(config_class.__name__, {})
    return config_class(**{key: value for key, value in values.items() if value is not None})


def _has_mrope(config_class: Any) -> bool:
    """Return True if the model's code splits rotary dimensions into sections of sizes that do not fit a tiny head."""
    module = importlib.import_module(config_class.__module__.replace("configuration_", "modeling_"))
    return "mrope_section" in inspect.getsource(module)


def _layers(default: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Keep one layer of each kind in the lists with an entry per layer."""
    number = getattr(default, "num_hidden_layers", None)
    lists = {k: v for k, v in own.items() if isinstance(v, list | tuple) and len(v) == number and number}
    if not lists:
        return {}
    kinds: dict[Any, int] = {}
    for index in range(int(number or 0)):
        kinds.setdefault(str([values[index] for values in lists.values()]), index)
    kept = sorted(kinds.values())[:4]
    if len(kept) == 1:
        kept = [0, 1]
    name = next(
        (k for k in ("num_hidden_layers", "n_layer", "num_layers", "n_layers") if k in own),
        "num_hidden_layers",
    )
    return {name: len(kept), **{key: [values[index] for index in kept] for key, values in lists.items()}}
