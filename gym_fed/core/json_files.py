"""Write canonical JSON for hashes and signatures, and read untrusted JSON with limits on size and depth.

Canonical JSON has sorted keys, no white space, UTF-8, and no NaN or infinities. Floats have their shortest round-trip
form, as Python's ``repr`` writes it.

Code that processes such values later (``copy``, ``repr``, pydantic) recurses at least once per level, so the depth
limit is far below that of Python's parser.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from gym_fed.core.errors import ErrorCode, GymError


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


MAX_BYTES = 64 << 20
"""Maximum size of a JSON file; the index of 20,000 tensors takes 2 MB."""
MAX_DEPTH = 64
"""Maximum nesting of a file, equal to the limit for YAML; model configs have at most 8 levels."""
MAX_REQUEST_DEPTH = 128
"""Maximum nesting of a request; templates, schemas and pydantic recurse at least once per level."""


def read_object(
    file: Path, code: ErrorCode = ErrorCode.MODEL_INVALID, hint: str = "restore it, or use another one"
) -> dict[str, Any]:
    """Read the JSON object in a file, ignoring a byte order mark.

    Args:
        file: Path of the file.
        code: Code of the raised error.
        hint: Hint of the raised error.

    Raises:
        GymError: With ``code`` if the path is not a regular file, exceeds ``MAX_BYTES``, does not contain a JSON
            object, or is nested more than ``MAX_DEPTH`` deep.
        OSError: If the file does not exist or cannot be read.
    """
    with open(file, "rb", opener=_without_waiting) as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise GymError(code, f"{file} cannot be read: not a regular file", hint)
        data = stream.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise GymError(code, f"{file} cannot be read: larger than {MAX_BYTES} bytes", hint)
    try:
        value = json.loads(data.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        raise GymError(code, f"{file} cannot be read: not valid JSON: {error}", hint) from error
    except UnicodeDecodeError as error:
        raise GymError(code, f"{file} cannot be read: not UTF-8 at byte {error.start}", hint) from error
    except ValueError as error:  # such as an integer with 5,000 digits
        raise GymError(code, f"{file} cannot be read: {error}", hint) from error
    except RecursionError as error:
        raise GymError(code, f"{file} cannot be read: nested too deeply", hint) from error
    if is_deeper(value, MAX_DEPTH):
        raise GymError(code, f"{file} cannot be read: nested too deeply", hint)
    if not isinstance(value, dict):
        raise GymError(code, f"{file} cannot be read: not a mapping", hint)
    return value


def _without_waiting(path: str, flags: int) -> int:
    """Open a file without blocking on a named pipe that has no writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # not from ``portable``, which imports asyncio


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object (``object_pairs_hook``); reject duplicate keys, since all but one would be ignored."""
    result: dict[str, Any] = {}
    for name, value in pairs:
        if name in result:
            raise ValueError(f"{name[:80]!r} occurs twice in one object")
        result[name] = value
    return result


def no_constant(word: str) -> NoReturn:
    """Reject ``NaN`` and infinities (``parse_constant``), which Python accepts although JSON has none."""
    raise ValueError(f"{word} is not a number in JSON")


def is_deeper(value: object, most: int) -> bool:
    """Return True if lists and mappings in ``value`` are nested more than ``most`` deep."""
    level = [value]
    for _ in range(most):
        level = [inner for item in level if isinstance(item, dict | list) for inner in _parts(item)]
    return any(isinstance(item, dict | list) for item in level)


def _parts(container: dict[Any, Any] | list[Any]) -> list[Any]:
    return list(container.values()) if isinstance(container, dict) else container


def strict_json(data: bytes | bytearray) -> Any:
    """Parse the JSON of a request; rejects duplicate keys, ``NaN`` and nesting beyond ``MAX_REQUEST_DEPTH``.

    Raises:
        ValueError: If the JSON is invalid.
    """
    try:
        value = json.loads(data, parse_constant=no_constant, object_pairs_hook=each_once)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if is_deeper(value, MAX_REQUEST_DEPTH):
        raise ValueError(f"nested too deeply, beyond {MAX_REQUEST_DEPTH} levels")
    return value
