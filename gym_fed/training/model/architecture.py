"""Read the ``transformers`` config of a run's model before its weights are loaded."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from gym_fed.base.modeling.config_checks import load_config
from gym_fed.base.models import is_hub_name, load_tokenizer, require_base_model, resolve
from gym_fed.config.train.training import ModelInit, TrainingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import counted

_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


def known_architecture(config: TrainingConfig) -> Any | None:
    """Return the config of a run's model, or of its adapter's base; None if it is not on this machine or is unreadable.

    The reason is reported when the model is loaded later.
    """
    try:
        return fresh_config(config, from_hub=False)
    except (GymError, StrictDataclassError, *_UNREADABLE):
        return None


def fresh_config(config: TrainingConfig, *, from_hub: bool = True) -> Any:
    """Return a new ``transformers`` config of a run's model, which the caller may modify.

    Raises:
        GymError: ``CONFIG_INVALID`` without a model; ``MODEL_NOT_FOUND`` if the model is not on this machine.
    """
    if config.model_init is not None:
        return new_config(config.model_init, load_tokenizer(config.model_init.tokenizer))
    if config.model is None:
        raise GymError(ErrorCode.CONFIG_INVALID, "model: not set", "set model or model_init")
    return read_config(config.model, from_hub=from_hub)


def read_config(name: str, *, from_hub: bool = True) -> Any:
    """Return a model's config, or that of an adapter's base.

    Args:
        name: A model name or folder.
        from_hub: True to read the config from the Hub if the model is not on this machine.
    """
    try:
        folder = Path(resolve(name))
    except GymError as error:
        if not from_hub or error.code is not ErrorCode.MODEL_NOT_FOUND or not is_hub_name(name):
            raise
        return _read_hub_config(name)
    adapter = folder / "adapter_config.json"
    if adapter.is_file() and not (folder / "config.json").is_file():
        require_base_model(name, folder)
        return read_config(str(read_object(adapter)["base_model_name_or_path"]), from_hub=from_hub)
    try:
        return load_config(folder)
    except (OSError, ValueError, RecursionError) as error:
        reason = f"{name}: its config cannot be read: {error}"
        raise GymError(ErrorCode.MODEL_INVALID, reason, "use another model") from error


def _read_hub_config(name: str) -> Any:
    from gym_fed.base.downloads import model_config

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(model_config(name)), encoding="utf-8")
        return load_config(Path(folder))


def new_config(settings: ModelInit, tokenizer: Any) -> Any:
    """Return the ``transformers`` config of a model with random weights; refuse a vocabulary that is too small."""
    if (settings.vocab_size or len(tokenizer)) < len(tokenizer):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"model_init.vocab_size: {settings.vocab_size}, but the tokenizer {settings.tokenizer} has "
            f"{counted(len(tokenizer), 'token')}",
            "raise or remove it, or set a different tokenizer",
        )
    sizes = settings.model_dump(exclude={"architecture", "tokenizer", "vocab_size", "rope_theta"})
    return model_classes(settings.architecture)[0](
        **sizes,
        vocab_size=settings.vocab_size or len(tokenizer),
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def model_classes(architecture: str) -> tuple[Any, Any]:
    """Return transformers' config and model classes of an architecture."""
    import transformers

    config, model = {
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
    }[architecture]
    return getattr(transformers, config), getattr(transformers, model)
