"""The reference of all config keys, from the schemas that check them: `gym docs config`."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from typing import Any

from gym_fed.cli.reference._markdown import cell

FILES = {
    "A training file: `gym train`": "gym_fed.config.train.training:TrainingConfig",
    "A hub: `gym-server.yaml`": "gym_fed.config.hub.server:ServerConfig",
    "A contributor's limits: `policy.yaml`": "gym_client.agent.policy:Policy",
    "A server of variants: `serving.yaml`": "gym_fed.config.serving:ServingConfig",
}
"""The headings, and the schema below each."""
_MAX_CHOICES = 12
_MAX_WORDS = 22
_TYPES = {"integer": "whole number", "string": "text", "boolean": "true or false", "object": "keys"}
_INTRODUCTION = """\
# Every key of every file

The keys of the four files that people write: what each takes, its default, and what it is for. A key that is not here
is refused with file, line and column. `--set section.key=value` sets a key for one command.

The schema has the whole text of each key: `gym configs schema --output train.schema.json`. With
`# yaml-language-server: $schema=train.schema.json` as a file's first line, an editor completes and checks its keys.
"""


def page() -> str:
    """A table for each section of each file."""
    parts = [_INTRODUCTION]
    for title, place in FILES.items():
        module, name = place.split(":")
        schema = getattr(importlib.import_module(module), name).model_json_schema()
        parts.append(f"## {title}\n\n" + "\n".join(_sections(schema)) + "\n")
    return "\n".join(parts)


def _sections(schema: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a schema's table, then of its sections' tables, each section once."""
    pending: list[tuple[str, dict[str, Any]]] = [("", schema)]
    seen: set[str] = set()
    while pending:
        path, section = pending.pop(0)
        if path:
            yield f"\n### `{path}`\n"
        if path and (text := section.get("description")):
            yield f"{_summary(text)}\n"
        yield "| key | takes | default | |\n|---|---|---|---|"
        for key, field in section.get("properties", {}).items():
            name = _reference(field)
            below = f"{path}.{key}" if path else key
            if name is not None and name not in seen:
                seen.add(name)
                pending.append((below, schema["$defs"][name]))
            text = field.get("description") or (schema["$defs"][name].get("description", "") if name else "")
            yield f"| `{key}` | {_type(field, schema)} | {_default(field, name)} | {_summary(text)} |"


def _reference(field: dict[str, Any]) -> str | None:
    """Return the name of the section that a key holds, or holds a list of."""
    for part in (field, *field.get("anyOf", ()), *field.get("allOf", ()), field.get("items", {})):
        if "$ref" in part:
            return str(part["$ref"].rpartition("/")[2])
        if "$ref" in part.get("items", {}):
            return str(part["items"]["$ref"].rpartition("/")[2])
    return None


def _type(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """A key's type in words, with its limits."""
    if "anyOf" in field:
        parts = [_type(part, schema) for part in field["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(parts))
    if "$ref" in field:
        target = schema["$defs"][field["$ref"].rpartition("/")[2]]
        return _type(target, schema) if "properties" not in target else "keys"
    if "enum" in field or "const" in field:
        names = [json.dumps(value).strip('"') for value in field.get("enum", [field.get("const")])]
        shown = ", ".join(f"`{name}`" for name in names[:_MAX_CHOICES])
        return shown + (", ..." if len(names) > _MAX_CHOICES else "")
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}), schema)}"
    name: str = field.get("type", "any")
    return _TYPES.get(name, name) + _limits(field)


def _limits(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {field[word]:g}" for word, sign in signs.items() if word in field]
    return f" {', '.join(limits)}" if limits else ""


def _default(field: dict[str, Any], section: str | None) -> str:
    if "default" not in field or (section is not None and field["default"] is not None):
        return ""
    value = field["default"]
    return "none" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`"


def _summary(text: str) -> str:
    """Return the first sentence of a description; ``gym configs schema`` has the rest."""
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(text.split()))[0]
    words = sentence.split("; ")[0]
    if len(words.split()) > _MAX_WORDS:
        words = re.sub(r" \([^()]*\)", "", words).split(": ")[0]
    return cell(words.rstrip(".:"))
