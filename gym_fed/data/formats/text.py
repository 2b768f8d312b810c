"""Plain text: the column text, learnt whole."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats.base import Raw, as_object, string


def read(raw: Any) -> Raw:
    """The text."""
    return {"text": string(as_object(raw), "text")}
