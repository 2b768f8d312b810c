"""The training form: all keys of the schema by group, and the change of one value in the YAML text.

A change keeps comments, order and layout: the parser's marks locate the value. The edited text is parsed again, and
the edit is rejected unless exactly that value differs; the user must then edit the text.
"""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gym_fed.config.train.training import TrainingConfig
from gym_fed.config.yaml.strict import KeyPath, parse_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.plain_yaml import StrictLoader
from gym_fed.core.registries import ALGORITHMS, TUNING
from gym_fed.webui.workbench import plain

FIRST = (
    *("algorithm", "model", "output_dir", "finetuning", "learning_rate", "max_steps", "num_train_epochs"),
    *("per_device_train_batch_size", "max_length", "logging_steps", "save_steps", "seed"),
)
"""Keys of nearly every run, displayed before the groups."""


_TITLES = {
    "AlgorithmSections": "Algorithm",
    "SupervisedSections": "Supervised algorithms",
    "TuningSections": "Tuning method",
    "AdapterSections": "Adapters to start from",
    "VisionSections": "Images",
    "OptimizationSections": "Optimisation",
    "DataSections": "Rows",
    "GraderSections": "Graders",
    "ComputeSections": "Compute",
    "DistributedSections": "Several processes",
    "PrivacySections": "Privacy",
    "RunSections": "Run",
    "TrackingSections": "Tracking",
    "TrainingConfig": "Model",
}
"""Titles of the schema's sections, by class."""


@cache
def form() -> dict[str, Any]:
    """Create the form: ``{first, groups: [{title, help, fields}], algorithms, tuning}``.

    A field is ``{key, kind, default, choices, least, most, help, section}``. Fields of kind ``yaml`` are edited as
    text.
    """
    schema = TrainingConfig.model_json_schema()
    definitions = schema["$defs"]
    groups = []
    for part in _parts():
        own = [key for key in inspect.get_annotations(part) if key in schema["properties"]]
        fields = [field for key in own for field in fields_of(key, schema["properties"][key], definitions)]
        if fields:
            groups.append({"title": _TITLES[part.__name__], "fields": fields})
    return {
        "first": list(FIRST),
        "groups": groups,
        "algorithms": list(ALGORITHMS.names()),
        "tuning": list(TUNING.names()),
    }


def _parts() -> list[type]:
    """Return the schema's classes with keys of their own; the model comes first."""
    return [part for part in TrainingConfig.__mro__ if part.__name__ in _TITLES]


def fields_of(key: str, property: dict[str, Any], definitions: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the field of a key, or the fields of its section."""
    section = next((schema for schema in _forms(property) if "$ref" in schema), None)
    if section is None:
        return [_field(key, property)]
    definition = definitions[section["$ref"].rpartition("/")[2]]
    if definition.get("type") != "object":
        return [_field(key, {**definition, **property})]
    about = str(property.get("description") or definition.get("description") or "")
    fields = [_field(f"{key}.{name}", inner) for name, inner in definition.get("properties", {}).items()]
    return [{**field, "section": key, "section_help": about} for field in fields]


def _field(key: str, property: dict[str, Any]) -> dict[str, Any]:
    forms = _forms(property)
    choices = [
        value
        for schema in forms
        for value in schema.get("enum", [schema["const"]] if "const" in schema else [])
    ]
    kinds = {schema.get("type") for schema in forms}
    if choices and "boolean" in kinds:
        kind, choices = "choice", [True, False, *choices]
    elif choices:
        kind = "choice"
    elif len(kinds) == 1 and kinds <= {"boolean", "integer", "number", "string"}:
        kind = str(kinds.pop())
    elif kinds <= {"boolean", "string"}:
        kind = "string"
    else:
        kind = "yaml"
    bounds = {name: schema[name] for schema in forms for name in schema}
    return {
        "key": key,
        "kind": kind,
        "default": plain(property.get("default")),
        "choices": choices,
        "least": bounds.get("minimum", bounds.get("exclusiveMinimum")),
        "most": bounds.get("maximum", bounds.get("exclusiveMaximum")),
        "help": " ".join(str(property.get("description") or "").replace("``", "`").split()),
    }


def _forms(property: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON schemas of a value without null, which means a missing key."""
    return [schema for schema in property.get("anyOf", [property]) if schema.get("type") != "null"]


_FILE = Path("config")
"""The name of the text in errors."""
Scalar = str | int | float | bool
Value = Scalar | list[dict[str, Any]]
"""A value of the form: a scalar, or the entries of a list such as ``data``."""


def with_value(text: str, path: tuple[str, ...], value: Value | None) -> str:
    """Return the text with a new value at a top-level key, or at a key of a section.

    Args:
        text: YAML text with one mapping.
        path: Key path such as ``("lora", "r")``; at most two keys.
        value: The new value; None removes the key, which restores its default. A list replaces the whole value of a
            top-level key, with its comments.

    Raises:
        GymError: ``CONFIG_INVALID`` for unreadable text; ``USAGE`` if the value cannot be changed without affecting
            others.
    """
    before, _ = parse_config(_FILE, text)
    if text and not text.endswith("\n"):
        text += "\n"
    root = StrictLoader(text).get_single_node()
    changed = _changed(text, root, path, value)
    try:
        after, _ = parse_config(_FILE, changed)
    except GymError:
        raise _refused(path) from None
    if not _is_single_change(after, before, path, value):
        raise _refused(path)
    return changed


def _changed(text: str, root: Any, path: tuple[str, ...], value: Value | None) -> str:
    if root is None:
        return text if value is None else text + _lines(path, value)
    pair = _pair(root, path[0])
    if pair is None:
        if value is None:
            return text
        if root.flow_style:
            raise _refused(path)
        return _inserted(text, _end_of_block(text, root), _lines(path, value, root.start_mark.column))
    if len(path) == 1:
        return _with_pair(text, root, pair, path, value)
    section = pair[1]
    if isinstance(section, yaml.ScalarNode) and section.tag.endswith(":null"):
        if value is None:
            return text
        end = _line_end(text, pair[0].end_mark.index)
        return _inserted(text, end, _lines(path[1:], value, pair[0].start_mark.column + 2))
    if not isinstance(section, yaml.MappingNode):
        raise _refused(path)
    inner = _pair(section, path[1])
    if inner is not None:
        return _with_pair(text, section, inner, path, value)
    if value is None:
        return text
    if section.flow_style:
        end = section.end_mark.index - 1
        comma = ", " if section.value else ""
        return f"{text[:end].rstrip()}{comma}{path[1]}: {_written(value)}{text[end:]}"
    place = _end_of_block(text, section)
    return _inserted(text, place, _lines(path[1:], value, section.start_mark.column))


def _with_pair(text: str, parent: Any, pair: Any, path: tuple[str, ...], value: Value | None) -> str:
    """Return the text with a new value for an existing pair, or without the pair."""
    key, node = pair
    start, end = node.start_mark.index, node.end_mark.index
    if value is not None and not isinstance(value, list):
        if not isinstance(node, yaml.ScalarNode) or node.style in ("|", ">"):
            raise _refused(path)
        gap = "" if start > key.end_mark.index + 1 else " "
        return f"{text[:start]}{gap}{_written(value)}{text[end:]}"
    if parent.flow_style:
        raise _refused(path)
    first = text.rfind("\n", 0, key.start_mark.index) + 1
    if text[first : key.start_mark.index].strip():  # a list item whose dash is on this line
        raise _refused(path)
    last = end if isinstance(node, yaml.ScalarNode) else _end_of_block(text, node)
    lines = "" if value is None else _lines(path, value, key.start_mark.column)
    return text[:first] + lines + text[_line_end(text, max(last - 1, key.end_mark.index)) :]


def _pair(mapping: Any, key: str) -> Any:
    return next((pair for pair in mapping.value if pair[0].value == key), None)


def _end_of_block(text: str, node: Any) -> int:
    """Return the end of a block's last line, before any comments and empty lines that follow."""
    if not isinstance(node, yaml.CollectionNode) or node.flow_style:
        return _line_end(text, max(node.end_mark.index - 1, 0))
    if not node.value:
        return node.end_mark.index
    last = node.value[-1]
    return _end_of_block(text, last[1] if isinstance(node, yaml.MappingNode) else last)


def _line_end(text: str, place: int) -> int:
    """Return the position after the line of ``place``."""
    newline = text.find("\n", place)
    return len(text) if newline < 0 else newline + 1


def _inserted(text: str, place: int, lines: str) -> str:
    before = text[:place]
    return f"{before}{'' if not before or before.endswith(chr(10)) else chr(10)}{lines}{text[place:]}"


def _lines(path: tuple[str, ...], value: Value, indent: int = 0) -> str:
    """Return ``lora:`` followed by an indented `` r: 8``."""
    *sections, key = path
    lines = [f"{' ' * (indent + 2 * depth)}{name}:" for depth, name in enumerate(sections)]
    begin = " " * (indent + 2 * len(sections))
    if not isinstance(value, list) or not all(value) or not value:
        return "\n".join([*lines, f"{begin}{key}: {_written(value)}"]) + "\n"
    lines.append(f"{begin}{key}:")
    for entry in value:
        marks = ["- ", *["  "] * (len(entry) - 1)]
        lines += [
            f"{begin}  {mark}{_written(name)}: {_written(item)}"
            for mark, (name, item) in zip(marks, entry.items(), strict=True)
        ]
    return "\n".join(lines) + "\n"


def _written(value: Any) -> str:
    """Format a value as YAML on one line."""
    if isinstance(value, str) and ("\n" in value or len(value) > 200):
        return str(yaml.safe_dump(value, default_style='"', width=10**9, allow_unicode=True)).strip()
    text = str(
        yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    )
    return text.strip().removesuffix("...").strip()


def _is_single_change(after: Any, before: Any, path: KeyPath, value: Value | None) -> bool:
    """Return True if ``after`` is ``before`` with that one value changed."""
    expected = {**before}
    if len(path) == 1:
        place = expected
    else:
        section = before.get(path[0])
        place = expected[path[0]] = {**section} if isinstance(section, dict) else {}
    if value is None:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = value
    if value is None and len(path) == 2 and not place:
        expected[path[0]] = after.get(path[0])  # YAML parses an empty section as null
        return expected == after and after.get(path[0]) in (None, {})
    return repr(expected) == repr(after) or expected == after


def _refused(path: tuple[str, ...]) -> GymError:
    return GymError(
        ErrorCode.USAGE,
        f"{'.'.join(path)} is written in a way that the form cannot change",
        "edit the text itself",
    )
