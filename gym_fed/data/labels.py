"""Reads the label of a judgement: whether an answer was liked."""

from __future__ import annotations

from typing import Any

_WORDS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def label_of(value: Any) -> bool | None:
    """True and false, 1 and 0 (also 1.0), or a word of these; None for anything else."""
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    return None
