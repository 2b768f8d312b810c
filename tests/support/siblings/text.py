"""Siblings of language models. The numbers that differ from the published files are sizes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.siblings import templates
from tests.support.siblings.family import Ids, Sibling
from tests.support.siblings.words import Words

_SIZE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "use_cache": True,
}
_QWEN_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>")
_VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
QWEN = Words(
    "bytes",
    "Qwen2Tokenizer",
    (*_QWEN_TOKENS, *_VISION_TOKENS, "<tool_call>", "</tool_call>", "<think>", "</think>"),
    eos="<|im_end|>",
    pad="<|endoftext|>",
    settings=(("add_bos_token", False), ("add_prefix_space", False), ("errors", "replace")),
)
_LLAMA_TOKENS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>")
LLAMA3 = Words(
    "bytes",
    "PreTrainedTokenizerFast",
    (*_LLAMA_TOKENS, "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|finetune_right_pad_id|>"),
    eos="<|eot_id|>",
    bos="<|begin_of_text|>",
    adds_bos=True,
    settings=(("model_input_names", ["input_ids", "attention_mask"]),),
)
GEMMA = Words(
    "gemma",
    "GemmaTokenizer",
    (
        *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"),
        *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    ),
    eos="<eos>",
    bos="<bos>",
    pad="<pad>",
    unk="<unk>",
    adds_bos=True,
    settings=(
        ("image_token", "<image_soft_token>"),
        ("boi_token", "<start_of_image>"),
        ("eoi_token", "<end_of_image>"),
    ),
)
MISTRAL = Words(
    "llama",
    "LlamaTokenizer",
    ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    eos="</s>",
    bos="<s>",
    unk="<unk>",
    adds_bos=True,
    settings=(("legacy", False),),
)
MIXTRAL = Words(
    "llama",
    "LlamaTokenizer",
    ("<unk>", "<s>", "</s>"),
    eos="</s>",
    bos="<s>",
    unk="<unk>",
    adds_bos=True,
    settings=(("legacy", True),),
)
PHI35 = Words(
    "llama",
    "LlamaTokenizer",
    ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"),
    eos="<|endoftext|>",
    bos="<s>",
    pad="<|endoftext|>",
    unk="<unk>",
    settings=(("legacy", False), ("padding_side", "left")),
)
PHI4_MINI = Words(
    "bytes",
    "GPT2Tokenizer",
    ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<|/tool|>"),
    eos="<|endoftext|>",
    bos="<|endoftext|>",
    pad="<|endoftext|>",
    unk="<|endoftext|>",
    settings=(("add_bos_token", False), ("add_prefix_space", False)),
)
DEEPSEEK = Words(
    "bytes",
    "LlamaTokenizerFast",
    (
        *(
            "<｜begin▁of▁sentence｜>",
            "<｜end▁of▁sentence｜>",
            "<｜User｜>",
            "<｜Assistant｜>",
            "<think>",
            "</think>",
        ),
        *("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        *(
            "<｜tool▁calls▁end｜>",
            "<｜tool▁outputs▁begin｜>",
            "<｜tool▁output▁begin｜>",
            "<｜tool▁output▁end｜>",
        ),
    ),
    eos="<｜end▁of▁sentence｜>",
    bos="<｜begin▁of▁sentence｜>",
    pad="<｜end▁of▁sentence｜>",
    adds_bos=True,
    settings=(("add_bos_token", True), ("add_eos_token", False), ("legacy", True)),
)
SMOLLM2 = Words(
    "bytes",
    "GPT2Tokenizer",
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    eos="<|im_end|>",
    bos="<|im_start|>",
    pad="<|im_end|>",
    unk="<|endoftext|>",
    settings=(("add_prefix_space", False),),
)


def _config(
    kind: str,
    architecture: str,
    *,
    bos: str | None,
    eos: str | tuple[str, ...],
    pad: str | None = None,
    **values: Any,
) -> Callable[[Ids], dict[str, Any]]:
    def config(ids: Ids) -> dict[str, Any]:
        ends = [ids[token] for token in ([eos] if isinstance(eos, str) else eos)]
        return {
            **_SIZE,
            "model_type": kind,
            "architectures": [architecture],
            "vocab_size": ids["vocab_size"],
            "bos_token_id": None if bos is None else ids[bos],
            "eos_token_id": ends[0] if isinstance(eos, str) else ends,
            **({} if pad is None else {"pad_token_id": ids[pad]}),
            **values,
        }

    return config


_QWEN_WINDOW = {"sliding_window": None, "use_sliding_window": False, "max_window_layers": 2}
_QWEN3 = {
    "head_dim": 16,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    **_QWEN_WINDOW,
}
_LLAMA_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_LONG = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [1.0, 1.3, 2.0, 4.0]}


def _llama3_rope(factor: float) -> dict[str, Any]:
    return {
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
        "rope_type": "llama3",
    }


def _llama(tied: bool, factor: float) -> Callable[[Ids], dict[str, Any]]:
    return _config(
        "llama",
        "LlamaForCausalLM",
        bos="<|begin_of_text|>",
        eos=_LLAMA_ENDS,
        **{
            "rope_scaling": _llama3_rope(factor),
            "rope_theta": 500000.0,
            "tie_word_embeddings": tied,
            "head_dim": 8,
        },
        **{"rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
    )


def _qwen2(**values: Any) -> Callable[[Ids], dict[str, Any]]:
    window = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 2}
    return _config("qwen2", "Qwen2ForCausalLM", **{"rms_norm_eps": 1e-6, **window, **values})


def _gemma(ids: Ids) -> dict[str, Any]:
    values = {
        **_SIZE,
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": ids["vocab_size"],
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "cache_implementation": "hybrid",
        "sliding_window": 16,
        "sliding_window_pattern": 6,
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "bos_token_id": ids["<bos>"],
        "eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]],
        "pad_token_id": ids["<pad>"],
    }
    del values["hidden_act"]
    return values


_QWEN_ENDS = ("<|im_end|>", "<|endoftext|>")
TEXT: dict[str, Sibling] = {
    "qwen3": Sibling(
        "Qwen/Qwen3-0.6B",
        QWEN,
        templates.shipped("qwen3"),
        _config(
            *("qwen3", "Qwen3ForCausalLM"),
            bos="<|endoftext|>",
            eos="<|im_end|>",
            **_QWEN3,
            tie_word_embeddings=True,
        ),
        _QWEN_ENDS,
    ),
    "qwen3_8b": Sibling(
        "Qwen/Qwen3-8B",
        QWEN,
        templates.shipped("qwen3"),
        _config(
            *("qwen3", "Qwen3ForCausalLM"),
            bos="<|endoftext|>",
            eos="<|im_end|>",
            **_QWEN3,
            tie_word_embeddings=False,
        ),
        _QWEN_ENDS,
    ),
    "qwen3_moe": Sibling(
        "Qwen/Qwen3-30B-A3B",
        QWEN,
        templates.shipped("qwen3"),
        _config(
            *("qwen3_moe", "Qwen3MoeForCausalLM"),
            bos="<|endoftext|>",
            eos="<|im_end|>",
            **_QWEN3,
            **{
                "tie_word_embeddings": False,
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "norm_topk_prob": True,
            },
            **{"moe_intermediate_size": 16, "decoder_sparse_step": 1, "mlp_only_layers": []},
            **{"output_router_logits": False, "router_aux_loss_coef": 0.001},
        ),
        _QWEN_ENDS,
    ),
    "qwen2": Sibling(
        "Qwen/Qwen2.5-0.5B-Instruct",
        QWEN,
        templates.shipped("qwen2_5"),
        _qwen2(bos="<|endoftext|>", eos="<|im_end|>", rope_theta=1000000.0, tie_word_embeddings=True),
        _QWEN_ENDS,
    ),
    "llama3": Sibling(
        "meta-llama/Llama-3.2-1B-Instruct",
        LLAMA3,
        templates.shipped("llama3_2"),
        _llama(True, 32.0),
        _LLAMA_ENDS,
    ),
    "llama3_8b": Sibling(
        "meta-llama/Llama-3.1-8B-Instruct",
        LLAMA3,
        templates.shipped("llama3_1"),
        _llama(False, 8.0),
        _LLAMA_ENDS,
    ),
    "gemma3": Sibling(
        "google/gemma-3-1b-it", GEMMA, templates.shipped("gemma3"), _gemma, ("<eos>", "<end_of_turn>")
    ),
    "mistral": Sibling(
        "mistralai/Mistral-7B-Instruct-v0.3",
        MISTRAL,
        templates.MISTRAL,
        _config(
            *("mistral", "MistralForCausalLM"),
            bos="<s>",
            eos="</s>",
            **{
                "sliding_window": None,
                "rope_theta": 1000000.0,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False,
            },
        ),
        ("</s>",),
    ),
    "mixtral": Sibling(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        MIXTRAL,
        templates.MIXTRAL,
        _config(
            *("mixtral", "MixtralForCausalLM"),
            bos="<s>",
            eos="</s>",
            **{
                "sliding_window": None,
                "rope_theta": 1000000.0,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": False,
            },
            **{"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02},
            output_router_logits=False,
        ),
        ("</s>",),
    ),
    "phi3": Sibling(
        "microsoft/Phi-3.5-mini-instruct",
        PHI35,
        templates.shipped("phi3_5"),
        _config(
            *("phi3", "Phi3ForCausalLM"),
            bos="<s>",
            eos="<|endoftext|>",
            pad="<|endoftext|>",
            **{"num_key_value_heads": 4, "rope_scaling": _LONG, "original_max_position_embeddings": 128},
            **{"sliding_window": 262144, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "embd_pdrop": 0.0},
            **{"resid_pdrop": 0.0, "attention_bias": False, "tie_word_embeddings": False},
        ),
        ("<|end|>", "<|endoftext|>"),
    ),
    "phi4_mini": Sibling(
        "microsoft/Phi-4-mini-instruct",
        PHI4_MINI,
        templates.PHI4_MINI,
        _config(
            *("phi3", "Phi3ForCausalLM"),
            bos="<|endoftext|>",
            eos="<|endoftext|>",
            pad="<|endoftext|>",
            **{
                "hidden_size": 64,
                "rope_scaling": {**_LONG, "short_factor": [1.0] * 6, "long_factor": [1.5] * 6},
            },
            **{
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 128,
                "sliding_window": 262144,
            },
            **{"rope_theta": 10000.0, "rms_norm_eps": 1e-5, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
            **{"attention_bias": False, "tie_word_embeddings": True},
        ),
        ("<|end|>", "<|endoftext|>"),
    ),
    "deepseek": Sibling(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        DEEPSEEK,
        templates.shipped("deepseek_r1_distill"),
        _qwen2(
            bos="<｜begin▁of▁sentence｜>",
            eos="<｜end▁of▁sentence｜>",
            **{"rope_theta": 10000, "tie_word_embeddings": False, "use_mrope": False},
        ),
        ("<｜end▁of▁sentence｜>",),
    ),
    "deepseek_llama": Sibling(
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        DEEPSEEK,
        templates.shipped("deepseek_r1_distill"),
        _config(
            *("llama", "LlamaForCausalLM"),
            bos="<｜begin▁of▁sentence｜>",
            eos="<｜end▁of▁sentence｜>",
            **{"rope_scaling": _llama3_rope(8.0), "rope_theta": 500000.0, "tie_word_embeddings": False},
            **{"rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1},
        ),
        ("<｜end▁of▁sentence｜>",),
    ),
    "smollm2": Sibling(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        SMOLLM2,
        templates.SMOLLM2,
        _config(
            *("llama", "LlamaForCausalLM"),
            bos="<|im_start|>",
            eos="<|im_end|>",
            **{
                "hidden_size": 24,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "tie_word_embeddings": True,
            },
            **{"rope_theta": 100000, "rms_norm_eps": 1e-5, "attention_bias": False, "mlp_bias": False},
        ),
        ("<|im_end|>",),
    ),
}
