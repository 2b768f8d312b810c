"""Change one value in the text of a config, preserving comments, order and layout.

The parser's marks locate the value. The edited text is parsed again, and the edit is refused unless exactly that value
differs. The user must then edit the text by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gym_fed.config.yaml.strict import KeyPath, parse_config
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.plain_yaml import StrictLoader

_FILE = Path("config")
"""The name of the text in errors."""
Scalar = str | int | float | bool
Value = Scalar | list[dict[str, Any]] | list[str]
"""A new value: a scalar, the entries of a list such as ``data``, or a list of strings."""


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
        return f"{text[:end].rstrip()}{comma}{path[1]}: {_as_yaml(value)}{text[end:]}"
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
        return f"{text[:start]}{gap}{_as_yaml(value)}{text[end:]}"
    if parent.flow_style:
        raise _refused(path)
    first = text.rfind("\n", 0, key.start_mark.index) + 1
    if text[first : key.start_mark.index].strip():  # it is a list item whose dash is on this line
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
    if not isinstance(value, list) or not all(value) or not value or isinstance(value[0], str):
        return "\n".join([*lines, f"{begin}{key}: {_as_yaml(value)}"]) + "\n"
    lines.append(f"{begin}{key}:")
    for entry in value:
        assert isinstance(entry, dict)
        marks = ["- ", *["  "] * (len(entry) - 1)]
        lines += [
            f"{begin}  {mark}{_as_yaml(name)}: {_as_yaml(item)}"
            for mark, (name, item) in zip(marks, entry.items(), strict=True)
        ]
    return "\n".join(lines) + "\n"


def _as_yaml(value: Any) -> str:
    """Format a value as YAML on one line."""
    if isinstance(value, str) and ("\n" in value or len(value) > 200):
        return str(yaml.safe_dump(value, default_style='"', width=10**9, allow_unicode=True)).strip()
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    return str(text).strip().removesuffix("...").strip()


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
        ErrorCode.USAGE, f"{'.'.join(path)} has a notation that the form cannot edit", "edit the YAML text"
    )
