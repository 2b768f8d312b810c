"""YAML files to validated schemas; every error reads ``file:line:column: path: message``.

Positions come from the YAML parser's own marks, kept beside the values, so that a pydantic error on
``training.lr`` points at the character where that value stands (or, for a missing key, at its parent).
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from gym_fed.errors import ErrorCode, GymError

ConfigT = TypeVar("ConfigT", bound=BaseModel)
KeyPath = tuple[str | int, ...]
Mark = tuple[int, int]

_MAX_CONFIG_BYTES = 1 << 20


def load_config(path: str | Path, schema: type[ConfigT], overrides: Sequence[str] = ()) -> ConfigT:
    """Read a YAML file into ``schema``.

    Args:
        path: The file; must be UTF-8 and at most 1 MiB.
        schema: A pydantic model.
        overrides: ``a.b=value`` settings that win over the file; values are parsed as YAML.

    Raises:
        GymError: ``FILE_NOT_FOUND``, or ``CONFIG_INVALID`` listing every problem, a line each.
    """
    file = Path(path)
    if not file.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no config file at {file}", "give the path of a YAML file")
    if file.stat().st_size > _MAX_CONFIG_BYTES:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file}: larger than {_MAX_CONFIG_BYTES} bytes")
    values, marks = _parse(file)
    for key_path, value in parse_overrides(overrides):
        _set(values, key_path, value)
        marks = {k: v for k, v in marks.items() if k[: len(key_path)] != key_path}
    return validate(values, schema, str(file), marks, {k for k, _ in parse_overrides(overrides)})


def validate(
    values: dict[str, Any],
    schema: type[ConfigT],
    source: str,
    marks: dict[KeyPath, Mark] | None = None,
    from_command_line: set[KeyPath] | None = None,
) -> ConfigT:
    """Validate plain values; see ``load_config`` for the errors."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        lines = [
            _describe(e, schema, source, marks or {}, from_command_line or set()) for e in error.errors()
        ]
        raise GymError(ErrorCode.CONFIG_INVALID, "\n".join(lines)) from error


def parse_overrides(overrides: Sequence[str]) -> list[tuple[KeyPath, Any]]:
    """``["a.b=3"]`` to ``[(("a", "b"), 3)]``.

    Raises:
        GymError: ``USAGE`` for text without ``=`` or with an empty key, ``CONFIG_INVALID`` for bad YAML.
    """
    parsed: list[tuple[KeyPath, Any]] = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not all(key.split(".")):
            raise GymError(ErrorCode.USAGE, f"--set {text!r} is not of the form a.b=value")
        try:
            value = yaml.safe_load(raw)
        except yaml.YAMLError as error:
            raise GymError(ErrorCode.CONFIG_INVALID, f"--set {text!r}: the value is not YAML") from error
        parsed.append((tuple(int(k) if k.isdecimal() else k for k in key.split(".")), value))
    return parsed


def dump_yaml(config: BaseModel) -> str:
    """The resolved config as YAML, in schema order, readable by ``load_config`` again."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def _parse(file: Path) -> tuple[dict[str, Any], dict[KeyPath, Mark]]:
    try:
        text = file.read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text)
    except UnicodeDecodeError as error:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file}: not UTF-8 at byte {error.start}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else str(file)
        raise GymError(ErrorCode.CONFIG_INVALID, f"{where}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file}: not valid YAML: {error}") from error
    if root is None:
        return {}, {}
    if not isinstance(root, yaml.MappingNode):
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file}:1:1: expected a mapping of keys to values")
    marks: dict[KeyPath, Mark] = {}
    _collect_marks(root, (), marks, file)
    return values, marks


def _collect_marks(node: yaml.Node, path: KeyPath, marks: dict[KeyPath, Mark], file: Path) -> None:
    marks.setdefault(path, (node.start_mark.line + 1, node.start_mark.column + 1))
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key_node, value_node in node.value:
            key = str(key_node.value)
            here = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
            if key in seen:
                raise GymError(
                    ErrorCode.CONFIG_INVALID,
                    f"{file}:{here[0]}:{here[1]}: {_dotted((*path, key))}: given twice",
                )
            seen.add(key)
            marks[(*path, key)] = here
            _collect_marks(value_node, (*path, key), marks, file)
    elif isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _collect_marks(child, (*path, index), marks, file)


def _set(values: Any, path: KeyPath, value: Any) -> None:
    for depth, key in enumerate(path[:-1]):
        child = values.get(key) if isinstance(values, dict) else values[int(key)]
        if child is None:
            child = values[key] = {}
        if not isinstance(child, dict | list):
            raise GymError(
                ErrorCode.CONFIG_INVALID, f"--set {_dotted(path)}: {_dotted(path[: depth + 1])} is a value"
            )
        values = child
    try:
        values[path[-1]] = value
    except (IndexError, TypeError) as error:
        raise GymError(
            ErrorCode.CONFIG_INVALID, f"--set {_dotted(path)}: no such place in the file"
        ) from error


def _describe(
    error: Any, schema: type[BaseModel], source: str, marks: dict[KeyPath, Mark], overridden: set[KeyPath]
) -> str:
    path: KeyPath = tuple(error["loc"])
    message = error["msg"]
    if error["type"] == "extra_forbidden":
        message = "unknown key" + _suggest(path, schema)
    elif error["type"] == "missing":
        message = "required, but not given"
    elif not isinstance(error["input"], dict | list):
        message = f"{message} (got {error['input']!r})"
    if any(path[: len(o)] == o for o in overridden):
        return f"--set: {_dotted(path)}: {message}"
    known = path
    while known not in marks and known:
        known = known[:-1]
    line, column = marks.get(known, (1, 1))
    return f"{source}:{line}:{column}: {_dotted(path) or '(file)'}: {message}"


def _suggest(path: KeyPath, schema: type[BaseModel]) -> str:
    """`` (did you mean 'x'?)`` when a known key at the same level is close."""
    fields: Any = schema
    for key in path[:-1]:
        info = getattr(fields, "model_fields", {}).get(key)
        fields = _model_in(info.annotation) if info is not None else None
    names = list(getattr(fields, "model_fields", {}))
    close = difflib.get_close_matches(str(path[-1]), names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else f" (known: {', '.join(names)})" if names else ""


def _model_in(annotation: Any) -> type[BaseModel] | None:
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def _dotted(path: KeyPath) -> str:
    return ".".join(str(k) for k in path)
