"""Mutations that know the structure of an input, so that a checksum or a length does not stop every mutation.

Each mutator takes a whole input and returns another one that is well-formed outside of what it changed.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

Mutator = Callable[[bytes, random.Random], bytes]
"""Changes one input; returns it unchanged if it cannot be taken apart."""

_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    255,
    2**31,
    2**53,
    2**63,
    10**400,
    -(10**400),
    0.5,
    -0.0,
    1e308,
    "",
    "0",
    "a",
    "../x",
    "\x00",
    "\u202e",
    "0" * 64,
    "z" * 64,
    "sha256:" + "0" * 64,
    "x" * 5000,
    [],
    [0],
    [[]],
    ["a"] * 300,
    {},
    {"a": 1},
)


def mutate_json(data: bytes, choice: random.Random) -> bytes:
    """Change one value, key or element of a JSON document."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return data
    return encoded(changed(document, choice))


def mutate_json_lines(data: bytes, choice: random.Random) -> bytes:
    """Change one line of JSON lines, or repeat, swap or delete a line."""
    lines = data.splitlines(keepends=True)
    if not lines:
        return data
    at, other = choice.randrange(len(lines)), choice.randrange(len(lines))
    what = choice.randrange(8)
    if what == 0:
        lines.insert(at, lines[other])
    elif what == 1:
        lines[at], lines[other] = lines[other], lines[at]
    elif what == 2:
        del lines[at]
    else:
        lines[at] = mutate_json(lines[at], choice).strip() + b"\n"
    return b"".join(lines)


def mutate_safetensors(data: bytes, choice: random.Random) -> bytes:
    """Change the JSON header of a safetensors file, also JSON inside its strings, and keep its length field right."""
    size = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else 0
    if size > len(data) - 8:
        return data
    header, rest = data[8 : 8 + size], data[8 + size :]
    if rest and choice.randrange(4) == 0:
        place = choice.randrange(len(rest))
        rest = rest[:place] + choice.randbytes(choice.choice((1, 2, 4))) + rest[place:]
        rest = rest[: len(data) - 8 - size]
    else:
        header = mutate_json(header, choice)
        header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + rest


def changed(value: Any, choice: random.Random) -> Any:
    """Return a copy of parsed JSON with one change, at a place drawn from all places."""
    places = list(_places(value, ()))
    path = choice.choice(places)
    found = value
    for step in path:
        found = found[step]
    return _replaced(value, path, _other(found, value, places, choice))


def encoded(value: Any) -> bytes:
    """Return canonical JSON, which readers that compare texts expect."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(
        "utf-8", errors="surrogatepass"
    )


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in range(min(len(value), 40)):
            yield from _places(value[index], (*path, index))


def _other(found: Any, document: Any, places: list[Any], choice: random.Random) -> Any:
    """Return what stands in the place of a value: a variant of it, another part of the document, or a fixed value."""
    what = choice.randrange(6)
    if isinstance(found, str) and found[:1] in "{[" and found and what < 4:
        return mutate_json(found.encode("utf-8", errors="surrogatepass"), choice).decode(errors="replace")
    if what == 0 and isinstance(found, dict) and found:
        gone = choice.choice(sorted(found, key=str))
        return {key: value for key, value in found.items() if key != gone}
    if what == 1 and isinstance(found, dict) and found:
        old = choice.choice(sorted(found, key=str))
        new = choice.choice((f"{old}x", "", "a", str(old).upper()))
        return {new if key == old else key: value for key, value in found.items()}
    if what == 0 and isinstance(found, list) and found:
        at = choice.randrange(len(found))
        return found[:at] + found[at + 1 :]
    if what == 1 and isinstance(found, list) and found:
        return [*found, choice.choice(found)]
    if what == 2 and type(found) in (int, float):
        return choice.choice(
            (found + 1, found - 1, -found, found * 2, float(found) if abs(found) < 1e300 else 0)
        )
    if what == 3 and isinstance(found, str) and found:
        at = choice.randrange(len(found))
        return found[:at] + choice.choice(("", "0", "f", "\n", "\u0660", "/")) + found[at + 1 :]
    if what == 4:
        other = document
        for step in choice.choice(places):
            other = other[step]
        return other
    return choice.choice(_VALUES)


def _replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _replaced(value[path[0]], path[1:], new)
    return copy
