"""Describe the state that a model carries between tokens, and whether it can be reset between packed rows."""

from __future__ import annotations

from typing import Any

_ATTENTION_LAYERS = frozenset(
    {
        *("full_attention", "sliding_attention", "chunked_attention", "window_attention", "attention"),
        *("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"),
        *("reference_sliding_attention", "minimax_m3_sparse", "sparse", "dense", "moe", "mlp"),
    }
)
"""Layer types whose only state is the keys and values of attention."""

ISOLATES_ROWS = frozenset(
    {
        *("apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "ernie4_5_moe"),
        *("exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "glm4_moe", "gpt2"),
        *(
            "gpt_bigcode",
            "gpt_neox",
            "gptj",
            "granite",
            "granitemoe",
            "helium",
            "hunyuan_v1_dense",
            "internlm3",
        ),
        *("llama", "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmo3", "olmoe"),
        *("persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss"),
        *("smollm3", "stablelm", "starcoder2"),
    }
)
"""Model types with the same loss and gradients for packed rows as for single rows, according to a test.

``tests/unit/training/test_packing_contract.py`` compares each of them. Other model types fail the test (ALiBi, absolute
positions that ignore ``position_ids``, masks without blocks) or have not been tested.
"""


def carried_state(config: Any) -> str | None:
    """Describe the state carried between tokens, other than keys and values; None if there is none.

    Args:
        config: A ``transformers`` config.
    """
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ()
    others = sorted(set(layers) - _ATTENTION_LAYERS)
    if others:
        return f"{', '.join(others)} layers"
    if any(_is_stateful(each) for each in (config, text)):
        return "recurrent state"
    return None


def _is_stateful(config: Any) -> bool:
    """Return True if transformers marks the model class as unable to return to an earlier token."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    mapped = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    classes = mapped if isinstance(mapped, tuple) else (mapped,)
    return any(getattr(each, "_is_stateful", False) for each in classes)
