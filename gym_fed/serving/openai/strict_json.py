"""JSON of requests: no repeated name, whose other value would be ignored, no ``NaN``, and no deep nesting.

What reads a request later (templates, schemas, pydantic) calls itself once or more a level, so depth is bounded far
below what Python's own reader takes.
"""

from __future__ import annotations

import json
from typing import Any

from gym_fed.core.json_files import each_once, is_deeper, no_constant

MAX_DEPTH = 128


def strict_json(data: bytes | bytearray) -> Any:
    """The value.

    Raises:
        ValueError: Why there is none.
    """
    try:
        found = json.loads(data, parse_constant=no_constant, object_pairs_hook=each_once)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if is_deeper(found, MAX_DEPTH):
        raise ValueError(f"nested too deeply, beyond {MAX_DEPTH} levels")
    return found
