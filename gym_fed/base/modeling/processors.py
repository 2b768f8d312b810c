"""Loads the processor of a model that reads images: its tokenizer, and what turns pictures into the model's input."""

from __future__ import annotations

import importlib.util
from contextlib import suppress
from typing import Any

from gym_fed.base.modeling.pictures_alone import films_left_out
from gym_fed.base.models import quiet_loading, resolve
from gym_fed.core.bounded.chat import bind_templates
from gym_fed.core.errors import ErrorCode, GymError


def load_processor(name_or_path: str) -> Any:
    """The processor from this machine, with a chat template where its tokenizer has one, and a pad token.

    Args:
        name_or_path: A folder, or a Hugging Face name in the local cache.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` for packages that prepare images, ``MODEL_INVALID`` for broken files.
    """
    from transformers import AutoProcessor

    _require("PIL", f"model: {name_or_path} reads images, which")
    source = resolve(name_or_path)
    try:
        with quiet_loading(), films_left_out():
            processor = AutoProcessor.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except (ImportError, AttributeError) as error:
        if "num2words" in str(error):  # SmolVLM's, for films
            _require("num2words", f"model: {name_or_path} has a processor that")
        # Some processors need torchvision for pictures, too; transformers raises several errors for that.
        _require("torchvision", f"model: {name_or_path} has a processor that")
        raise unreadable(name_or_path, error) from error
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise unreadable(name_or_path, error) from error
    if not is_processor(processor):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name_or_path}: has no processor for images",
            "put processor_config.json or preprocessor_config.json beside the model",
        )
    if processor.chat_template is None:  # a repository may carry it beside the tokenizer alone
        processor.chat_template = processor.tokenizer.chat_template
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    bind_templates(processor, name_or_path)
    bind_templates(processor.tokenizer, name_or_path)
    return processor


def is_processor(tokenizer: Any) -> bool:
    """Whether what was handed in as a tokenizer prepares images, too."""
    return getattr(tokenizer, "image_processor", None) is not None


def unreadable(name: str, error: Exception) -> GymError:
    """That a model that reads images, or its processor, cannot be read."""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"{name}: cannot be read as a vision-language model: {first_line}",
        "restore its files, or give another folder",
    )


def _require(module: str, what: str) -> None:
    found = None
    with suppress(ModuleNotFoundError):
        found = importlib.util.find_spec(module)
    if found is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{what} needs the package {module}, which is not installed",
            "pip install 'gym-fed[vision]'",
        )
