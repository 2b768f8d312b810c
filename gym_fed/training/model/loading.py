"""Load the model that a config names for training, or build one with random weights (``model_init``)."""

from __future__ import annotations

from typing import Any

from gym_fed.base.modeling.adapters import merged
from gym_fed.base.modeling.processors import is_vision_model, load_vision_model
from gym_fed.base.models import load_model, load_tokenizer
from gym_fed.config.train.training import ModelInit, TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.training.model.adapters import merge_starting_adapters
from gym_fed.training.model.architecture import model_classes, new_config
from gym_fed.training.model.packed_layers import pack_layers
from gym_fed.training.model.quantization import is_quantised, quantization_arguments
from gym_fed.training.processes.sharding import loading_arguments
from gym_fed.training.vision.conversations import require_model_of_text


def load_for_training(config: TrainingConfig) -> tuple[Any, Any]:
    """Load the model and tokenizer (or processor, for images) of ``config.model`` or ``config.model_init``.

    The adapters that the run starts from are merged into the model, except the one that it trains further.

    Raises:
        GymError: ``CONFIG_INVALID`` for an adapter on an adapter; errors from ``load_model``.
    """
    if config.model_init is not None:
        return init_model(config.model_init, seed=config.seed, dtype=config.dtype)
    assert config.model is not None  # the trainer refuses this
    if config.unsloth:
        from gym_fed.training.features.unsloth import load_by_unsloth

        return load_by_unsloth(config)
    if ALGORITHMS.type_of(config.algorithm).reads_images and is_vision_model(config.model):
        arguments = loading_arguments(config)
        model, processor = load_vision_model(config.model, dtype=config.loaded_dtype, arguments=arguments)
        return merge_starting_adapters(model, config), processor
    require_model_of_text(config)
    arguments = {**loading_arguments(config), **quantization_arguments(config)}
    loaded = load_model(config.model, dtype=config.loaded_dtype, arguments=arguments)
    model = loaded.model
    if hasattr(model, "merge_and_unload"):
        reason = f"model: {config.model} is itself an adapter"
        remedy = (
            f"set model to its base, and adapter: {config.model} to train it further, or finetuning: full"
        )
        refuse_first((TUNING.type_of(config.finetuning).is_adapter, reason, remedy))
        model = merged(model, config.model)
    return pack_layers(merge_starting_adapters(model, config), config), loaded.tokenizer


def require_dtype(model: Any, config: TrainingConfig) -> None:
    """Refuse a model in memory whose dtype differs from the config's, since it would be trained without conversion."""
    dtype = str(model.dtype).removeprefix("torch.")
    key = "base_dtype" if config.base_dtype is not None else "dtype"
    if key in config.model_fields_set and dtype != config.loaded_dtype and not is_quantised(model):
        reason = f"{key}: {config.loaded_dtype} is set, but the model in memory is {dtype}"
        remedy = f"pass model.to(torch.{config.loaded_dtype}), or remove the key"
        raise GymError(ErrorCode.USAGE, reason, remedy)


def init_model(settings: ModelInit, *, seed: int, dtype: str) -> tuple[Any, Any]:
    """Build a causal LM whose weights depend only on the seed.

    Args:
        settings: Sizes and tokenizer.
        seed: Seed of the random weights.
        dtype: Dtype of the weights.

    Returns:
        ``(model, tokenizer)``.

    Raises:
        GymError: ``CONFIG_INVALID`` if the tokenizer has more tokens than ``vocab_size``.
    """
    import torch
    from transformers import GenerationConfig, set_seed

    tokenizer = load_tokenizer(settings.tokenizer)
    config = new_config(settings, tokenizer)
    set_seed(seed)
    model = model_classes(settings.architecture)[1](config).to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=False
    )
    return model, tokenizer
