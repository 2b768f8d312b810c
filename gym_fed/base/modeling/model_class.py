"""The class of transformers that loads a model folder, by its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.base.modeling.config_checks import images_type
from gym_fed.core.json_files import read_object


def reads_media(folder: Path) -> bool:
    """Return True if the config of a model has a part that reads images or sound."""
    file = folder / "config.json"
    if not file.is_file():
        return False
    config = read_object(file)
    return "vision_config" in config or "audio_config" in config or images_type(folder) is not None


def has_media_part(config: Any) -> bool:
    """Return True if a transformers config has a part that reads images or sound."""
    return any(hasattr(config, part) for part in ("vision_config", "audio_config"))


def class_for(folder: Path) -> Any:
    """Return the class that loads a model, always the full model, even if transformers has a text-only class for it.

    It is an auto class, or the class that the config names if none of the auto classes knows its type.
    """
    import transformers

    if not reads_media(folder):
        return transformers.AutoModelForCausalLM
    config = read_object(folder / "config.json")
    mapping: Any = transformers.CONFIG_MAPPING
    classes: Any = transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    kind = mapping.get(config.get("model_type"))
    named = getattr(transformers, str((config.get("architectures") or [""])[0]), None)
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    return named if is_model and kind not in classes else transformers.AutoModelForMultimodalLM
