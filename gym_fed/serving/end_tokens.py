"""The end-of-sequence tokens of a model, validated because its files may contain anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError


def end_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return the end tokens of generation_config.json, config.json and the tokenizer.

    Raises:
        GymError: ``MODEL_INVALID`` for a value that is not a token id of the model.
    """
    folder = Path(getattr(model, "name_or_path", None) or "")
    ids = _ids(model, model.config, folder / "config.json")  # transformers copies it into the other
    ids |= _ids(model, getattr(model, "generation_config", None), folder / "generation_config.json")
    return ids if tokenizer.eos_token_id is None else ids | {tokenizer.eos_token_id}


def _ids(model: Any, config: Any, file: Path) -> frozenset[int]:
    value = getattr(config, "eos_token_id", None)
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list | tuple) else [value]
    most = _vocabulary(model)
    if not all(
        type(token_id) is int and token_id >= 0 and (most is None or token_id < most) for token_id in ids
    ):
        problem = "no token id" if most is None else f"no token id below {most:,}"
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{file}: eos_token_id is {str(value)[:80]}, and that is {problem}, and no list of such",
            "correct it, or leave it out",
        )
    return frozenset(ids)


def _vocabulary(model: Any) -> int | None:
    """Return the size of the vocabulary; None if the config does not give it."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    size = getattr(config, "vocab_size", None)
    return size if type(size) is int else None
