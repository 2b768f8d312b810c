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
    """Convert a YAML or JSON value: texts are truncated valid UTF-8, numbers finite, other types text."""
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
    """Return a value's truncated text; bytes that are not UTF-8 become question marks."""
    try:
        string = value if isinstance(value, str) else str(value)
    except ValueError:  # an integer with too many digits for str()
        string = "a number of too many digits"
    return string[:MAX_TEXT].encode("utf-8", "replace").decode()
