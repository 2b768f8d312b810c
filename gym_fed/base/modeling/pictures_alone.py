"""Processors of models that read pictures and films (Qwen2-VL's and later ones'), where torchvision is not installed.

transformers needs torchvision for their films alone. Here films are refused, so a stand-in keeps the film settings as
they are in the files, and pictures are prepared by transformers' own PIL code.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object

_FILES = ("processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json")
"""Where the settings of films stand: newer layouts first."""


@contextmanager
def films_left_out() -> Iterator[None]:
    """Inside, processors load without torchvision; nothing changes where it is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    from transformers import processing_utils

    # By its name: as an attribute of its package it is a stand-in that needs torchvision, until it is imported.
    module: Any = importlib.import_module("transformers.models.auto.video_processing_auto")
    kinds: Any = processing_utils.MODALITY_TO_BASE_CLASS_MAPPING
    before, kind = module.AutoVideoProcessor, kinds["video_processor"]
    module.AutoVideoProcessor = _Stand
    kinds["video_processor"] = (
        "ImageProcessingMixin"  # which the stand-in is, too; the class named needs torchvision
    )
    try:
        yield
    finally:
        module.AutoVideoProcessor, kinds["video_processor"] = before, kind


class _Stand:
    """In place of ``AutoVideoProcessor`` while a processor is read."""

    @staticmethod
    def from_pretrained(source: str, **_arguments: Any) -> Any:
        from transformers.video_processing_utils import VideoProcessorMixin

        settings = _film_settings(Path(source))

        class NoFilms(VideoProcessorMixin):
            """Keeps the settings, and refuses films."""

            def __init__(self) -> None:
                """Its settings are not transformers' to check."""

            def to_dict(self) -> dict[str, Any]:
                return dict(settings)

            def preprocess(self, *_args: Any, **_kwargs: Any) -> Any:
                raise GymError(
                    ErrorCode.MISSING_DEPENDENCY,
                    "films need the package torchvision, which is not installed",
                    "pip install 'gym-fed[vision]'",
                )

        return NoFilms()


def _film_settings(folder: Path) -> dict[str, Any]:
    for name in _FILES:
        file = folder / name
        values = read_object(file) if file.is_file() else {}
        values = values.get("video_processor", {}) if name == _FILES[0] else values
        if isinstance(values, dict) and values:
            return values
    return {}
