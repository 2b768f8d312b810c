"""The pages that are made from the code: docs/config.md from the schemas, docs/api.md from the public names.

python tools/pages.py            write them
python tools/pages.py --check    exit status 1 where one is not what the code says
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- from the code, by tools/pages.py -->\n", "<!-- until here -->\n"

FILES = {
    "A training file: `gym train`": "gym_fed.config.train.training:TrainingConfig",
    "A hub: `gym-server.yaml`": "gym_fed.config.hub.server:ServerConfig",
    "A contributor's limits: `policy.yaml`": "gym_client.agent.policy:Policy",
    "A server of variants: `serving.yaml`": "gym_fed.config.serving:ServingConfig",
}
"""Headings of docs/config.md, and the schema below each."""
PACKAGES = (
    "gym_fed",
    "gym_fed.quickstart",
    "gym_fed.data",
    "gym_fed.evaluation",
    "gym_fed.quantization",
    "gym_fed.personalization",
    "gym_fed.registry",
    "gym_server.strategy",
)
"""Whose public names docs/api.md has; what else can be imported may change with any version."""
_MOST_CHOICES = 12
_MOST_WORDS = 22
_WORDS = {"integer": "whole number", "string": "text", "boolean": "true or false", "object": "keys"}


def config_page() -> str:
    """docs/config.md as it should be."""
    parts = []
    for title, place in FILES.items():
        module, name = place.split(":")
        schema = getattr(importlib.import_module(module), name).model_json_schema()
        parts.append(f"## {title}\n\n" + "\n".join(_sections(schema)) + "\n")
    return _filled("config.md", "\n".join(parts))


def api_page() -> str:
    """docs/api.md as it should be: a table of names, and the place of each for the site."""
    parts = []
    for package in PACKAGES:
        module = importlib.import_module(package)
        rows = "".join(f"| `{name}` | {_summary(getattr(module, name))} |\n" for name in public_names(module))
        places = "".join(f"::: {package}.{name}\n\n" for name in public_names(module))
        parts.append(f"## `{package}`\n\n| name | is |\n|---|---|\n{rows}\n{places}")
    return _filled("api.md", "\n".join(parts))


def public_names(module: Any) -> list[str]:
    """Functions and classes that a package offers, or that a module defines."""
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__ and not name.startswith("_")
    ]
    return sorted(name for name in names if callable(getattr(module, name)))


def _filled(page: str, text: str) -> str:
    before, rest = (DOCS / page).read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def _summary(value: Any) -> str:
    text = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    return _cell(text)


# ---- schemas ----


def _sections(schema: dict[str, Any]) -> Iterator[str]:
    """The table of a schema, then those of its sections, each once and where it is first met."""
    waiting: list[tuple[str, dict[str, Any]]] = [("", schema)]
    seen: set[str] = set()
    while waiting:
        path, one = waiting.pop(0)
        if path:
            yield f"\n### `{path}`\n"
        if path and (words := one.get("description")):
            yield f"{_first(words)}\n"
        yield "| key | takes | default | |\n|---|---|---|---|"
        for key, field in one.get("properties", {}).items():
            name = _reference(field)
            below = f"{path}.{key}" if path else key
            if name is not None and name not in seen:
                seen.add(name)
                waiting.append((below, schema["$defs"][name]))
            words = _first(
                field.get("description") or (schema["$defs"][name].get("description", "") if name else "")
            )
            yield f"| `{key}` | {_takes(field, schema)} | {_default(field, name)} | {words} |"


def _reference(field: dict[str, Any]) -> str | None:
    """The section that a key holds, or a list of such sections."""
    for part in (field, *field.get("anyOf", ()), *field.get("allOf", ()), field.get("items", {})):
        if "$ref" in part:
            return str(part["$ref"].rpartition("/")[2])
        if "$ref" in part.get("items", {}):
            return str(part["items"]["$ref"].rpartition("/")[2])
    return None


def _takes(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """A key's type in words, with its limits."""
    if "anyOf" in field:
        parts = [_takes(part, schema) for part in field["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(parts))
    if "$ref" in field:
        found = schema["$defs"][field["$ref"].rpartition("/")[2]]
        return _takes(found, schema) if "properties" not in found else "keys"
    if "enum" in field or "const" in field:
        names = [json.dumps(value).strip('"') for value in field.get("enum", [field.get("const")])]
        shown = ", ".join(f"`{name}`" for name in names[:_MOST_CHOICES])
        return shown + (", ..." if len(names) > _MOST_CHOICES else "")
    if field.get("type") == "array":
        return f"list of {_takes(field.get('items', {}), schema)}"
    return _WORDS.get(field.get("type", ""), field.get("type", "any")) + _limits(field)


def _limits(field: dict[str, Any]) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    found = [f"{sign} {field[word]:g}" for word, sign in signs.items() if word in field]
    return f" {', '.join(found)}" if found else ""


def _default(field: dict[str, Any], section: str | None) -> str:
    if "default" not in field or (section is not None and field["default"] is not None):
        return ""
    value = field["default"]
    return "none" if value is None else f"`{json.dumps(value, ensure_ascii=False)}`"


def _first(text: str) -> str:
    """The first sentence of a description; ``gym configs schema`` has the rest."""
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(text.split()))[0]
    words = sentence.split("; ")[0]
    if len(words.split()) > _MOST_WORDS:
        words = re.sub(r" \([^()]*\)", "", words).split(": ")[0]
    return _cell(words.rstrip(".:"))


def _cell(text: str) -> str:
    return re.sub(r"``(.+?)``", r"`\1`", text).replace("|", "\\|")


def main() -> int:
    """Write, or with ``--check`` compare."""
    wanted = {"config.md": config_page(), "api.md": api_page()}
    stale = [page for page, text in wanted.items() if (DOCS / page).read_text(encoding="utf-8") != text]
    for page in stale:
        if "--check" not in sys.argv:
            (DOCS / page).write_text(wanted[page], encoding="utf-8")
        print(DOCS / page)
    return 1 if stale and "--check" in sys.argv else 0


if __name__ == "__main__":
    sys.exit(main())
