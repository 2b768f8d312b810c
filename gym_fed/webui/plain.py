"""Convert arbitrary values from files of a run to JSON values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_TEXT = 4000
"""Maximum characters of a text."""
MAX_ITEMS = 1000
"""Maximum items of a list or mapping."""
_MAX_DEPTH = 12


def plain(value: Any, depth: int = 0) -> Any:
    """Convert any value to a JSON value with truncated valid UTF-8 strings and finite numbers."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        return {text(key): plain(item, depth + 1) for key, item in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, list | tuple) and depth < _MAX_DEPTH:
        return [plain(item, depth + 1) for item in value[:MAX_ITEMS]]
    return text(value)


def text(value: Any) -> str:
    """Return a value as truncated text; invalid UTF-8 bytes become question marks."""
    try:
        string = value if isinstance(value, str) else str(value)
    except ValueError:  # an integer with too many digits for str()
        string = "a number of too many digits"
    return string[:MAX_TEXT].encode("utf-8", "replace").decode()
