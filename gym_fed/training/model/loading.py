"""Loads the model that a config names for training."""

from __future__ import annotations

from typing import Any

from gym_fed.base.modeling.adapters import merged
from gym_fed.base.modeling.processors import is_vision_model, load_vision_model
from gym_fed.base.models import load_model
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError, refuse_first
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.training.model.adapters import on_its_adapters
from gym_fed.training.model.quantization import quantization_arguments
from gym_fed.training.processes.sharding import loading_arguments
from gym_fed.training.vision.conversations import require_model_of_text


def load_for_training(config: TrainingConfig) -> tuple[Any, Any]:
    """Load the model and tokenizer (or processor, for images) of ``config.model`` or ``config.model_init``.

    Adapters that the run starts from are in the model's weights, but for one that is trained on.

    Raises:
        GymError: ``CONFIG_INVALID`` for an adapter on an adapter; see ``load_model`` for the others.
    """
    if config.model_init is not None:
        from gym_fed.training.model.scratch import init_model

        return init_model(config.model_init, seed=config.seed, dtype=config.dtype)
    assert config.model is not None  # the trainer refuses this
    if config.unsloth:
        from gym_fed.training.features.unsloth import load_by_unsloth

        return load_by_unsloth(config)
    if ALGORITHMS.type_of(config.algorithm).reads_images and is_vision_model(config.model):
        model, processor = load_vision_model(
            config.model, dtype=config.loaded_dtype, arguments=loading_arguments(config)
        )
        return on_its_adapters(model, config), processor
    require_model_of_text(config)
    arguments = {**loading_arguments(config), **quantization_arguments(config)}
    loaded = load_model(config.model, dtype=config.loaded_dtype, arguments=arguments)
    if not hasattr(loaded.model, "merge_and_unload"):
        return on_its_adapters(loaded.model, config), loaded.tokenizer
    reason = f"model: {config.model} is itself an adapter"
    remedy = f"give model: its base, and adapter: {config.model} to train it on, or finetuning: full"
    refuse_first((TUNING.type_of(config.finetuning).is_adapter, reason, remedy))
    return on_its_adapters(merged(loaded.model, config.model), config), loaded.tokenizer


def require_dtype(model: Any, config: TrainingConfig) -> None:
    """Refuse a model in memory whose weights do not have the config's ``dtype``; it is trained unconverted.

    Raises:
        GymError: ``USAGE``.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    key = "base_dtype" if config.base_dtype is not None else "dtype"
    if (
        key in config.model_fields_set
        and dtype != config.loaded_dtype
        and not getattr(model, "is_quantized", False)
    ):
        raise GymError(
            ErrorCode.USAGE,
            f"{key}: {config.loaded_dtype} is set, and the model in memory is in {dtype}",
            f"give model.to(torch.{config.loaded_dtype}), or remove the key",
        )
