"""Load models that read images, sound or video, and their processors, with or without torchvision.

transformers needs torchvision for the videos of Qwen2-VL and later models. Without it a placeholder keeps the video
settings of the files, and transformers' PIL code prepares images.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gym_fed.base.modeling.config_checks import require_architecture
from gym_fed.base.modeling.model_class import class_for, reads_media
from gym_fed.base.modeling.split_patterns import require_quick_tokenizer, without_lengths
from gym_fed.base.models import MAX_ADAPTERS, named_base, quiet_loading, resolve
from gym_fed.core.bounded.chat import bind_templates
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.requirements import require_package

_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_PACKAGES = {
    "num2words": "vision",
    "torchvision": "vision",
    **dict.fromkeys(("torchaudio", "librosa", "soundfile", "mistral-common", "timm"), ""),
}
"""Packages that processors of transformers need, and the extra of gym-fed that installs each."""


def load_processor(name_or_path: str) -> Any:
    """Load a processor from this machine, with a chat template if its tokenizer has one, and a pad token.

    Args:
        name_or_path: A folder, or a Hugging Face name in the local cache.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` for packages that process images, ``MODEL_INVALID`` for broken files.
    """
    from transformers import AutoProcessor

    source = str(_processor_folder(Path(resolve(name_or_path))))
    require_quick_tokenizer(Path(source), name_or_path)
    try:
        with quiet_loading(), without_torchvision():
            processor = AutoProcessor.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            "the installed torchvision was built for a different torch, so it does not load",
            "install both from the same package index",
        ) from error
    except (ImportError, AttributeError) as error:
        require_package("PIL", f"model: {name_or_path} reads images, which", "vision")
        _require_named_packages(name_or_path, error)
        # Some processors also need torchvision for images; transformers raises various errors then.
        require_package("torchvision", f"model: {name_or_path} has a processor that", "vision")
        raise unreadable(name_or_path, error) from error
    except (OSError, ValueError, KeyError, RecursionError) as error:
        _require_named_packages(name_or_path, error)
        raise unreadable(name_or_path, error) from error
    if not is_processor(processor):
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name_or_path}: has no processor for images or audio",
            "put processor_config.json or preprocessor_config.json into the model folder",
        )
    if processor.chat_template is None:  # some repositories store it only with the tokenizer
        processor.chat_template = processor.tokenizer.chat_template
    without_lengths(processor.tokenizer)
    if processor.tokenizer.pad_token is None:
        processor.tokenizer.pad_token = processor.tokenizer.eos_token
    bind_templates(processor, name_or_path)
    bind_templates(processor.tokenizer, name_or_path)
    return processor


def _require_named_packages(name: str, error: Exception) -> None:
    """Refuse a processor if transformers' error names a package that it needs and that is missing.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` with the package.
    """
    for package, extra in _PACKAGES.items():
        if package in str(error).lower():
            remedy = "" if extra else f"pip install {package}"
            subject = f"model: {name} has a processor that"
            require_package(package.replace("-", "_"), subject, extra, remedy=remedy)


def _processor_folder(folder: Path) -> Path:
    """Return the folder with a model's processor; for an adapter without one, the folder of its base."""
    for _ in range(MAX_ADAPTERS):
        adapter = folder / "adapter_config.json"
        if not adapter.is_file() or any((folder / name).is_file() for name in _PROCESSOR_FILES):
            break
        if (base := named_base(folder)) is None:
            break
        folder = Path(resolve(base))
    return folder


def is_vision_model(name_or_path: str) -> bool:
    """Return True if the model's config has a part that reads images or sound."""
    return reads_media(Path(resolve(name_or_path)))


def load_vision_model(name_or_path: str, *, dtype: str, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Load a model that reads images or sound, and its processor, from this machine.

    Args:
        name_or_path: A folder, or a Hugging Face name in the local cache.
        dtype: Type of the weights.
        arguments: Further keyword arguments of ``from_pretrained``.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` without the packages for images, ``MODEL_INVALID`` for broken files.
    """
    import torch

    from gym_fed.base.modeling.loading import load_weights

    source = resolve(name_or_path)
    require_architecture(name_or_path, Path(source))
    processor = load_processor(name_or_path)
    try:
        with quiet_loading():
            given = {"dtype": getattr(torch, dtype), **arguments}
            model = load_weights(class_for(Path(source)), source, given, name=name_or_path)
    except (ImportError, AttributeError, OSError, ValueError, KeyError, RecursionError) as error:
        raise unreadable(name_or_path, error) from error
    return model.eval(), processor


_PARTS = {
    "images": ("image_processor",),
    "audios": ("feature_extractor", "audio_processor"),
    "videos": ("video_processor",),
}
"""The attributes of a processor that prepare each column of media."""


def is_processor(tokenizer: Any) -> bool:
    """Return True if a tokenizer argument is a processor that also handles images, sound or video."""
    return bool(media_of(tokenizer))


def media_of(processor: Any) -> frozenset[str]:
    """Return the columns of media that a processor reads: ``images``, ``audios``, ``videos``."""
    parts = {column: [getattr(processor, name, None) for name in names] for column, names in _PARTS.items()}
    return frozenset(
        column
        for column, handlers in parts.items()
        if any(part is not None and not getattr(part, "is_placeholder", False) for part in handlers)
    )


def unreadable(name: str, error: Exception) -> GymError:
    """Return the error for a model or processor that cannot be read."""
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return GymError(
        ErrorCode.MODEL_INVALID,
        f"{name}: cannot be read as an image or audio model: {first_line}",
        "restore its files, or use another folder",
    )


_FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
"""Names of files with video settings, newest layout first."""


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Load processors without torchvision in this context; has no effect if it is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    from transformers import processing_utils

    # Import by name: the package's attribute is a placeholder that needs torchvision.
    module: Any = importlib.import_module("transformers.models.auto.video_processing_auto")
    kinds: Any = processing_utils.MODALITY_TO_BASE_CLASS_MAPPING
    previous, kind = module.AutoVideoProcessor, kinds["video_processor"]
    module.AutoVideoProcessor = _PlaceholderLoader
    kinds["video_processor"] = (
        "ImageProcessingMixin"  # the placeholder's base; the usual one needs torchvision
    )
    try:
        yield
    finally:
        module.AutoVideoProcessor, kinds["video_processor"] = previous, kind


class _PlaceholderLoader:
    """Replacement for ``AutoVideoProcessor`` while a processor is loaded."""

    @staticmethod
    def from_pretrained(source: str, **_arguments: Any) -> Any:
        from transformers.video_processing_utils import VideoProcessorMixin

        settings = _video_settings(Path(source))

        class PlaceholderVideoProcessor(VideoProcessorMixin):
            """Placeholder that keeps the settings of a video processor and rejects videos."""

            is_placeholder = True

            def __init__(self) -> None:
                """Set the settings as attributes, which some processors read, without transformers' validation."""
                vars(self).update(settings)

            def to_dict(self) -> dict[str, Any]:
                return dict(settings)

            def preprocess(self, *_args: Any, **_kwargs: Any) -> Any:
                raise GymError(
                    ErrorCode.MISSING_DEPENDENCY,
                    "videos need the package torchvision, which is not installed",
                    "pip install 'gym-fed[vision]'",
                )

        return PlaceholderVideoProcessor()


def _video_settings(folder: Path) -> dict[str, Any]:
    for name in _FILES:
        file = folder / name
        values = read_object(file) if file.is_file() else {}
        values = values.get("video_processor", {}) if name == _FILES[0] else values
        if isinstance(values, dict) and values:
            return values
    return {}
