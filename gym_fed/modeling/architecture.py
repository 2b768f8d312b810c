"""Whether transformers has a model's architecture: code that comes with a model is never run."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from gym_fed.errors import ErrorCode, GymError


def require_architecture(name: str, folder: Path) -> None:
    """Refuse a model whose ``config.json`` names an architecture that transformers lacks; others pass.

    Raises:
        GymError: ``MODEL_INVALID``.
    """
    from transformers import CONFIG_MAPPING

    kind = None
    with suppress(OSError, ValueError, AttributeError):  # reading the model will report it
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    if not isinstance(kind, str) or kind in CONFIG_MAPPING:
        return
    raise GymError(
        ErrorCode.MODEL_INVALID,
        f"{name}: transformers has no architecture {kind!r}, and code that comes with a model is never run",
        "give a model of an architecture of transformers, or install a transformers that has this one",
    )
