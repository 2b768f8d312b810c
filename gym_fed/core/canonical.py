"""Canonical JSON, which gym-fed hashes and signs.

Sorted keys, no white space, UTF-8, no NaN or infinities. Floats use Python's shortest round-trip form, which every
IEEE-754 implementation of ``repr`` shares.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> bytes:
    """Encode plain data (dict with string keys, list, str, int, float, bool, None).

    Raises:
        ValueError: For NaN, infinities, or keys that are not strings.
        TypeError: For values that JSON cannot represent.
    """
    _check_keys(value)
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode("utf-8")


def canonical_digest(value: Any) -> str:
    """Return the hex sha256 of ``canonical_json(value)``."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _check_keys(value: Any) -> None:
    if isinstance(value, dict):
        for key, child in value.items():
            if not isinstance(key, str):
                raise ValueError(f"key {key!r} is not a string")
            _check_keys(child)
    elif isinstance(value, list | tuple):
        for child in value:
            _check_keys(child)
