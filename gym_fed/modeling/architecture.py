"""Whether transformers has a model's architecture: code that comes with a model is never run."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from gym_fed.errors import ErrorCode, GymError
from gym_fed.json_files import read_object
from gym_fed.modeling.mixture_of_depths import MODEL_TYPE as MIXTURE_OF_DEPTHS
from gym_fed.text import plain


def require_architecture(name: str, folder: Path) -> None:
    """Refuse a model whose ``config.json`` names an architecture that neither transformers nor gym-fed has.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    from transformers import CONFIG_MAPPING

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
