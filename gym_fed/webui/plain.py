"""What comes from files of a run as values that JSON can hold, however odd they are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_TEXT = 4000
"""Characters of one value that pages are sent."""
MAX_ITEMS = 1000
"""Of one list or mapping."""
_MAX_DEPTH = 12


def plain(value: Any, depth: int = 0) -> Any:
    """A value of YAML or JSON for a page: text is cut and is valid UTF-8, numbers are finite, the rest is its text."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else text(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping) and depth < _MAX_DEPTH:
        return {text(key): plain(one, depth + 1) for key, one in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, list | tuple) and depth < _MAX_DEPTH:
        return [plain(one, depth + 1) for one in value[:MAX_ITEMS]]
    return text(value)


def text(value: Any) -> str:
    """A value's text, cut where it goes on; bytes of a file's name that are not UTF-8 become question marks."""
    try:
        found = value if isinstance(value, str) else str(value)
    except ValueError:  # a number of more digits than Python prints
        found = "a number of too many digits"
    return found[:MAX_TEXT].encode("utf-8", "replace").decode()
