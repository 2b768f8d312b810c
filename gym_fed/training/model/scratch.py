"""A model with random weights, from the ``model_init`` section of a config."""

from __future__ import annotations

from typing import Any

from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.training import ModelInit
from gym_fed.core.errors import ErrorCode, GymError


def init_model(settings: ModelInit, *, seed: int, dtype: str) -> tuple[Any, Any]:
    """Build a causal LM whose weights depend on the seed alone.

    Args:
        settings: Sizes and tokenizer.
        seed: Seed of the random weights.
        dtype: Type of the weights.

    Returns:
        ``(model, tokenizer)``.

    Raises:
        GymError: ``CONFIG_INVALID`` when the tokenizer has more tokens than ``vocab_size``.
    """
    import torch
    from transformers import GenerationConfig, set_seed

    tokenizer = load_tokenizer(settings.tokenizer)
    config = _config(settings, tokenizer)
    set_seed(seed)
    model = _classes(settings.architecture)[1](config).to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    return model, tokenizer


def scratch_config(settings: ModelInit) -> Any:
    """Return the ``transformers`` config of the model that ``init_model`` builds."""
    return _config(settings, load_tokenizer(settings.tokenizer))


def _config(settings: ModelInit, tokenizer: Any) -> Any:
    if (settings.vocab_size or len(tokenizer)) < len(tokenizer):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"model_init.vocab_size: {settings.vocab_size}, but the tokenizer {settings.tokenizer} has "
            f"{len(tokenizer)} tokens",
            "raise it, leave it out, or name another tokenizer",
        )
    return _classes(settings.architecture)[0](
        vocab_size=settings.vocab_size or len(tokenizer),
        hidden_size=settings.hidden_size,
        num_hidden_layers=settings.num_hidden_layers,
        intermediate_size=settings.intermediate_size,
        num_attention_heads=settings.num_attention_heads,
        num_key_value_heads=settings.num_key_value_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=settings.tie_word_embeddings,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def _classes(architecture: str) -> tuple[Any, Any]:
    """Return transformers' config and model classes of an architecture."""
    import transformers

    config, model = {
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
    }[architecture]
    return getattr(transformers, config), getattr(transformers, model)
