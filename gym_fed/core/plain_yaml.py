"""Parse untrusted YAML: aliases are refused, since they can expand exponentially; numbers and depth are bounded."""

from __future__ import annotations

from typing import Any

import yaml

from gym_fed.core.json_files import MAX_DEPTH, is_deeper
from gym_fed.core.text import counted

_MAX_SHOWN_CHARS = 80
_MAX_NUMBER_CHARS = 4000


def parse_value(text: str) -> Any:
    """Parse a YAML or JSON value from a command line or an untrusted file.

    Raises:
        ValueError: If the text is invalid, nested too deeply, or contains an alias.
    """
    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=StrictLoader)):
            raise ValueError("aliases (*) are not supported; write the value out")
        values = yaml.load(text, Loader=StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error).partition("\n")[0]) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if is_deeper(values, MAX_DEPTH):
        raise ValueError("nested too deeply")
    return values


class StrictLoader(yaml.SafeLoader):
    """The safe loader, with locations in errors and a limit on the nesting of brackets."""

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        """Refuse deep nesting early, since the scanner's time grows with its square."""
        super().fetch_flow_collection_start(TokenClass)
        if self.flow_level > 2 * MAX_DEPTH:  # before this, the caller gives the location
            raise yaml.scanner.ScannerError(None, None, "nested too deeply", self.get_mark())

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = str(node.tag).rpartition(":")[2]
        if kind in ("int", "float") and len(node.value) > _MAX_NUMBER_CHARS:  # parsing 1:1:1... takes seconds
            problem = f"a number of {counted(len(node.value), 'character')}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep=deep)
        except (ValueError, KeyError, AttributeError) as error:  # such as month 13, or !!bool perhaps
            problem = f"{shown(node.value)} is not a valid {kind}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error


def shown(value: Any) -> str:
    """Return the repr of a value for an error message, truncated if it is long."""
    text = repr(value)
    return (
        text
        if len(text) <= _MAX_SHOWN_CHARS
        else f"{text[:_MAX_SHOWN_CHARS]}... ({counted(len(text), 'character')})"
    )
