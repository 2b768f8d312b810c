"""Check that transformers supports a model's architecture, since code that comes with a model is never run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import read_object
from gym_fed.core.text import plain


def require_architecture(name: str, folder: Path) -> None:
    """Refuse a model whose ``config.json`` names an architecture that neither transformers nor gym-fed has.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    from transformers import CONFIG_MAPPING

    from gym_fed.base.modeling.mixture_of_depths import MODEL_TYPE as MIXTURE_OF_DEPTHS

    kind, has_code = None, False
    with suppress(OSError, ValueError, AttributeError):  # reading the model will report it
        config = read_object(folder / "config.json")
        kind, has_code = config.get("model_type"), "auto_map" in config
    known = isinstance(kind, str) and (kind in CONFIG_MAPPING or kind == MIXTURE_OF_DEPTHS)
    if known or (kind is None and not has_code):
        return
    raise GymError(
        ErrorCode.MODEL_INVALID,
        f"{name}: transformers has no architecture {plain(kind, 60)!r}, and code that comes with a model is never run",
        "give a model of an architecture of transformers, or install a transformers that has this one",
    )


def images_type(folder: Path) -> str | None:
    """The model type if it reads images and has no text-only class in transformers; else None."""
    with suppress(OSError, ValueError, AttributeError):  # loading will say so
        config = read_object(folder / "config.json")
        if "vision_config" not in config:
            return None
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as TEXT_CLASSES

        if config.get("model_type") not in TEXT_CLASSES:
            return str(config.get("model_type"))
    return None


def require_text(name: str, folder: Path) -> None:
    """Refuse a model that reads images and has no text-only class in transformers.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    if (kind := images_type(folder)) is not None:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{name}: is a {kind} model, which reads images; it is trained and served by `gym api` here, but the rest "
            "takes models of text",
            "load its folder with transformers (AutoModelForImageTextToText), or give a model of text",
        )
