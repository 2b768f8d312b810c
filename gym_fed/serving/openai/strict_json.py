"""JSON of requests: no repeated name, whose other value would be ignored, no ``NaN``, and no deep nesting.

What reads a request later (templates, schemas, pydantic) calls itself once or more a level, so depth is bounded far
below what Python's own reader takes.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from gym_fed.json_files import is_deeper

MAX_DEPTH = 128


def strict_json(data: bytes | bytearray) -> Any:
    """The value.

    Raises:
        ValueError: Why there is none.
    """
    try:
        found = json.loads(data, parse_constant=_no_number, object_pairs_hook=_each_once)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if is_deeper(found, MAX_DEPTH):
        raise ValueError(f"nested too deeply, beyond {MAX_DEPTH} levels")
    return found


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} is there twice in one object")
        found[name] = value
    return found
