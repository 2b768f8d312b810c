"""Detect JSON schema references that lead back to themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from gym_fed.core.text import whole_number


def reference_cycle(schema: dict[str, Any]) -> str:
    """Return a ``$ref`` that leads back to itself without a property or an item in between; empty if there is none.

    No value satisfies such a schema, and llguidance refuses it without a reason. A recursive type, such as a list node
    whose property refers to the node, is not such a cycle.
    """
    done: set[int] = set()
    for start in _subschemas(schema):
        path: dict[int, str] = {}
        current: list[tuple[dict[str, Any], str]] = [(start, "")]
        while current:
            part, reference = current.pop()
            if reference == _LEAVE:
                path.pop(id(part))
                done.add(id(part))
                continue
            if id(part) in path:
                return reference
            if id(part) in done:
                continue
            path[id(part)] = reference
            current.append((part, _LEAVE))
            current += _same_value(part, schema, reference)
    return ""


_LEAVE = "\0"
"""Marks a part whose references have all been followed."""


def _subschemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every object in the schema."""
    left: list[Any] = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            yield value
            left += value.values()
        elif isinstance(value, list):
            left += value


def _same_value(
    part: dict[str, Any], schema: dict[str, Any], reference: str
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the schemas that the same value must satisfy: the target of ``$ref``, and those in ``allOf``."""
    pointer = part.get("$ref")
    if isinstance(pointer, str) and (target := _target(pointer, schema)) is not None:
        yield target, pointer
    together = part.get("allOf")
    for other in together if isinstance(together, list) else []:
        if isinstance(other, dict):
            yield other, reference


def _target(pointer: str, schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the object at a JSON pointer into the schema; None if there is none, or it is in another document."""
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    value: Any = schema
    for name in unquote(pointer).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list) and (index := whole_number(key)) is not None and index < len(value):
            value = value[index]
        elif isinstance(value, dict) and key in value:
            value = value[key]
        else:
            return None
    return value if isinstance(value, dict) else None
