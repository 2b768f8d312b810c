"""Read YAML files into validated schemas; errors have the form ``file:line:column: path: message``.

Positions are the YAML parser's marks, which are stored with the values: a pydantic error on ``training.lr``
points at that key (an item of a list: at the item; a missing key: at its parent), and an error in a value
from the command line names ``--set``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from gym_fed.config.parsed import ParsedConfig
from gym_fed.config.schema.base import AcceptsAliases, Problems
from gym_fed.config.schema.member import ByMember, MemberOf
from gym_fed.config.schema.open_keys import OpenModel
from gym_fed.config.schema.plugins import markers_of
from gym_fed.config.yaml.strict import KeyPath, Mark, dotted
from gym_fed.core import aliases
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import MAX_DEPTH
from gym_fed.core.plain_yaml import parse_value, shown
from gym_fed.core.registries import UnusableMember

ConfigT = TypeVar("ConfigT", bound=BaseModel)
_MAX_NAMES = 30


def load_config(
    source: ParsedConfig | str | Path, schema: type[ConfigT], overrides: Sequence[str] = ()
) -> ConfigT:
    """Read a YAML file into ``schema``.

    Args:
        source: File, UTF-8 and at most 1 MiB, or a parsed file.
        schema: A pydantic model.
        overrides: ``a.b=value`` settings that take precedence over the file; values are parsed as YAML.

    Raises:
        GymError: ``FILE_NOT_FOUND``, ``USAGE`` for a malformed override, ``MISSING_DEPENDENCY`` for the first member
            that cannot be used, or ``CONFIG_INVALID`` listing every problem, one per line.
    """
    parsed = ParsedConfig.read(source)
    values = _unshared(parsed.values)
    placed = place_overrides(values, overrides)
    marks = {k: v for k, v in parsed.marks.items() if not any(k[: len(place)] == place for place in placed)}
    return validate(values, schema, str(parsed.file), marks, placed)


def validate(
    values: dict[str, Any],
    schema: type[ConfigT],
    source: str,
    marks: dict[KeyPath, Mark] | None = None,
    from_command_line: set[KeyPath] | None = None,
    *,
    resolve_aliases: bool = True,
) -> ConfigT:
    """Validate plain values; errors as in ``load_config``. Names from other tools are accepted with a note."""
    positions = _Positions(source, marks or {}, from_command_line or set())
    try:
        return schema.model_validate(values, context=AcceptsAliases.from_file)
    except ValidationError as error:
        if resolve_aliases and (resolved := _resolve_aliases(values, schema, positions)):
            values, own = resolved
            return validate(values, schema, source, own.marks, own.overridden, resolve_aliases=False)
        lines = [
            line
            for problem in error.errors(include_url=False)
            for line in _lines(problem, values, schema, positions)
        ]
        raise GymError(ErrorCode.CONFIG_INVALID, "\n".join(dict.fromkeys(lines))) from error
    except UnusableMember as error:
        path = place_of(error.kind, error.name, values, schema)
        raise GymError(error.code, positions.message(path, error.message), error.hint) from error


def dump_yaml(config: BaseModel) -> str:
    """Return the resolved config as YAML for ``load_config``, in schema order, without absent sections."""
    fields = type(config).model_fields
    values = {
        key: value
        for key, value in config.model_dump(mode="json").items()
        if value is not None or (key in fields and fields[key].default is not None)
    }
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def parse_overrides(overrides: Sequence[str]) -> list[tuple[KeyPath, Any]]:
    """Parse ``["a.b=3"]`` to ``[(("a", "b"), 3)]``; a key that consists of digits is a list index.

    Raises:
        GymError: ``USAGE`` for text without ``=`` or with an empty key, ``CONFIG_INVALID`` for bad YAML.
    """
    parsed: list[tuple[KeyPath, Any]] = []
    for text in overrides:
        key, equals, raw = text.partition("=")
        if not equals or not all(key.split(".")):
            raise GymError(ErrorCode.USAGE, f"--set {text!r} is not of the form a.b=value")
        if key.count(".") > MAX_DEPTH:
            raise GymError(ErrorCode.USAGE, f"--set {shown(key)}: a key has at most {MAX_DEPTH} dots")
        try:
            value = parse_value(raw)
        except ValueError as error:
            message = f"--set {shown(text)}: the value is not YAML"
            raise GymError(ErrorCode.CONFIG_INVALID, message, str(error)) from error
        parsed.append((tuple(int(k) if k.isdecimal() else k for k in key.split(".")), value))
    return parsed


def place_overrides(values: dict[str, Any], overrides: Sequence[str]) -> set[KeyPath]:
    """Set overrides in plain values.

    Args:
        values: Plain values, changed in place.
        overrides: ``a.b=value`` settings.

    Returns:
        The paths of the settings.

    Raises:
        GymError: Errors of ``parse_overrides``.
    """
    return {_set(values, path, value) for path, value in parse_overrides(overrides)}


def place_of(kind: str, name: str, values: Any, schema: type[BaseModel]) -> KeyPath:
    """Return the position of the first mention of a member, as its kind spells it; empty if there is none.

    Args:
        kind: Kind of the member, such as ``grader``.
        name: Name of the member in configs; also found as a key that is not a field.
        values: Plain values, valid or not.
        schema: Schema of the values.
    """
    return next(_places(kind, name, values, schema, ()), ())


def models_in(annotations: Sequence[Any]) -> Iterator[type[BaseModel]]:
    """Yield the schemas in annotations, at any depth."""
    for annotation in annotations:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield annotation
        else:
            yield from models_in(get_args(annotation))


def _places(
    kind: str, name: str, value: Any, annotation: Any, markers: Sequence[MemberOf]
) -> Iterator[KeyPath]:
    if value == name and any(kind == known.kind for marker in markers for known in marker.kinds):
        yield ()
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _prefixed(index, _places(kind, name, item, annotation, markers))
    elif isinstance(value, Mapping):
        fields = {k: f for model in models_in([annotation]) for k, f in model.model_fields.items()}
        for key, inner in value.items():
            if (field := fields.get(key)) is not None:
                places = _places(kind, name, inner, field.annotation, markers_of(field))
            elif key == name and fields:
                places = iter([()])
            else:
                places = _places(kind, name, inner, annotation, markers)
            yield from _prefixed(key, places)


def _prefixed(key: str | int, paths: Iterator[KeyPath]) -> Iterator[KeyPath]:
    return ((key, *path) for path in paths)


def _resolve_aliases(
    values: dict[str, Any], schema: type[BaseModel], positions: _Positions
) -> tuple[dict[str, Any], _Positions] | None:
    """Return refused values under gym-fed's names, with their positions; None if none of them is an alias."""

    def place(path: KeyPath) -> str:
        return positions.message(path, "").partition(f": {dotted(path)}")[0]

    marks, overridden = positions.marks, positions.overridden
    reading = aliases.read(schema.__name__, values, None if () in overridden else place)
    if reading is None:
        return None
    for path, theirs, ours in reading.notes:
        aliases.note(theirs, ours, place(path))
    moved_marks, moved_overrides = dict(marks), set(overridden)
    for now, before in reading.origins.items():
        moved_marks |= {
            (*now, *path[len(before) :]): mark
            for path, mark in marks.items()
            if path[: len(before)] == before
        }
        moved_overrides |= {
            (*now, *path[len(before) :]) if path[: len(before)] == before else now
            for path in overridden
            if path[: len(before)] == before[: len(path)]
        }
    return reading.values, _Positions(positions.source, moved_marks, moved_overrides)


def _unshared(value: Any) -> Any:
    """Return a copy in which YAML aliases are separate values, so that setting one does not change the others."""
    if isinstance(value, dict):
        return {k: _unshared(v) for k, v in value.items()}
    return [_unshared(v) for v in value] if isinstance(value, list) else value


def _set(values: Any, path: KeyPath, value: Any) -> KeyPath:
    """Set ``value`` at ``path``, creating mappings as needed; return the path with its keys' actual types."""
    place: KeyPath = ()
    for key in path[:-1]:
        key = _key_for(values, key, path)
        child = values[key] if isinstance(values, list) else values.get(key)
        place = (*place, key)
        if child is None:
            child = values[key] = {}
        if not isinstance(child, dict | list):
            reason = f"--set {dotted(path)}: {dotted(place)} is a value"
            remedy = (
                "in the file, write it as a section, or as a list of sections such as [{path: rows.jsonl}]"
            )
            raise GymError(ErrorCode.CONFIG_INVALID, reason, remedy)
        values = child
    last = _key_for(values, path[-1], path)
    values[last] = value
    return (*place, last)


def _key_for(container: dict[str, Any] | list[Any], key: str | int, path: KeyPath) -> Any:
    """Return the key in its container's type: a name for a mapping, an existing index for a list."""
    if isinstance(container, dict):
        return str(key)
    if isinstance(key, int) and key < len(container):
        return key
    message = f"--set {dotted(path)}: no item {key!r} in a list of {len(container)}"
    raise GymError(
        ErrorCode.CONFIG_INVALID, message, "items count from 0; to lengthen a list, set the whole list"
    )


@dataclass(frozen=True)
class _Positions:
    """The positions of a config's keys, in its file or on the command line.

    Attributes:
        source: The file, or ``--set``.
        marks: Line and column of keys and items in the file.
        overridden: Paths of the settings on the command line.
    """

    source: str
    marks: dict[KeyPath, Mark]
    overridden: set[KeyPath]

    def is_overridden(self, path: KeyPath) -> bool:
        """Return True if the command line sets the key or a section above it."""
        return any(path[: len(override)] == override for override in self.overridden)

    def mark(self, path: KeyPath, otherwise: Mark = (1, 1)) -> Mark:
        """Return the position of a key in the file, or of the section that lacks it."""
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks[path] if path else otherwise

    def message(self, path: KeyPath, text: str) -> str:
        """Return ``text``, prefixed with the key and its position in the file or on the command line."""
        if self.is_overridden(path):
            return f"--set: {dotted(path)}: {text}" if path else f"--set: {text}"
        line, column = self.mark(path, self.marks.get((), (1, 1)))
        return f"{self.source}:{line}:{column}: {dotted(path) or '(file)'}: {text}"


def _lines(
    error: Any, values: dict[str, Any], schema: type[BaseModel], positions: _Positions
) -> Iterator[str]:
    """Yield one line for an error, or one per reason for a refused combination."""
    raised = error.get("ctx", {}).get("error")
    if not isinstance(raised, Problems):
        yield _describe(error, values, schema, positions)
        return
    cause: KeyPath = (*error["loc"], raised.cause) if raised.cause else ()
    for problem in raised.problems:
        is_within = not raised.cause or problem.key.startswith(f"{raised.cause}.")
        prefix = "" if is_within else f"{raised.cause}: "
        path = (*error["loc"], *problem.key.split("."))
        if positions.is_overridden(path):
            yield f"--set: {prefix}{problem}"
            continue
        line, column = positions.mark(path, otherwise=positions.mark(cause))
        yield f"{positions.source}:{line}:{column}: {prefix}{problem}"


def _describe(error: Any, values: dict[str, Any], schema: type[BaseModel], positions: _Positions) -> str:
    path = _place(tuple(error["loc"]), values)
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "extra_forbidden":
        message = "unknown key" + _suggest(path, schema, values)
    elif error["type"] == "missing":
        message = "required, but missing"
    elif not isinstance(error["input"], dict | list):
        message = f"{message} (got {shown(error['input'])})"
    return positions.message(path, message)


def _place(loc: KeyPath, values: Any) -> KeyPath:
    """Return pydantic's location without the names of union members, which are not keys of the file."""
    place: KeyPath = ()
    for depth, key in enumerate(loc):
        last = depth == len(loc) - 1
        if isinstance(values, dict) and (key in values or last):
            values = values.get(key)
        elif isinstance(values, list) and isinstance(key, int) and key < len(values):
            values = values[key]
        else:
            continue
        place = (*place, key)
    return place


def _suggest(path: KeyPath, schema: type[BaseModel], values: Any) -> str:
    """Return `` (did you mean 'x'?)`` if a known key at the same level is close."""
    level: list[Any] = [schema]
    for key in path[:-1]:
        level = [inner for annotation in level for inner in _below(annotation, key)]
        values = values[key]
    models = (m.chosen(values) if issubclass(m, ByMember) else m for m in models_in(level))
    names = list(dict.fromkeys(name for model in models for name in model.model_fields))
    alias = aliases.nearest(
        schema.__name__, dotted(path), values.get(path[-1]) if isinstance(values, dict) else None
    )
    if alias and alias not in names:
        return f" ({alias})"
    close = [alias] if alias else difflib.get_close_matches(str(path[-1]), names, n=1)
    if close:
        return f" (did you mean {close[0]!r}?)"
    return f" (known: {', '.join(names)})" if 0 < len(names) <= _MAX_NAMES else ""


def _below(annotation: Any, key: str | int) -> list[Any]:
    """Return the annotations under ``key``: that of a field, or that of the elements of a list or mapping."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        field = annotation.model_fields.get(str(key))
        if field is None and issubclass(annotation, OpenModel):
            return [annotation.added_key(str(key))]
        return [field.annotation] if field is not None else []
    models = list(models_in([annotation]))
    inside = [inner for model in models for inner in _below(model, key)]
    return inside or list(models)
