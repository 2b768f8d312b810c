"""Parse strict YAML to plain values with their positions.

It is stricter than YAML 1.1: no duplicate keys, no merge keys, only YAML's own tags, and limits on size, depth and
alias expansion, so that a hostile file is refused before it uses resources.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import MAX_DEPTH
from gym_fed.core.plain_yaml import StrictLoader

KeyPath = tuple[str | int, ...]
"""Keys of mappings and indices of lists, from the root down."""
Mark = tuple[int, int]
"""Line and column, both from 1."""

_MAX_CONFIG_BYTES = 1 << 20
_MAX_VALUES = 200_000
_TAG = "tag:yaml.org,2002:"


def read_config_text(file: Path) -> str:
    """Read the text of a config file.

    Raises:
        GymError: ``FILE_NOT_FOUND``, or ``CONFIG_INVALID`` if it is unreadable, too large or not UTF-8.
    """
    if not file.is_file():
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"no config file at {file}", "pass the path of a YAML file")
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file} cannot be read: {error.strerror}") from error
    if len(data) > _MAX_CONFIG_BYTES:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file}: larger than {_MAX_CONFIG_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file}: not UTF-8 at byte {error.start}") from error


def parse_config(file: Path, text: str) -> tuple[dict[str, Any], dict[KeyPath, Mark]]:
    """Parse ``text`` to values and marks; ``file`` is for messages only.

    Raises:
        GymError: ``CONFIG_INVALID`` with line and column if it is not a single mapping of keys to values.
    """
    marks: dict[KeyPath, Mark] = {}
    try:
        loader = StrictLoader(text)
        root = loader.get_single_node()
        if root is None:
            return {}, {}
        if not isinstance(root, yaml.MappingNode):
            raise _refusal(file, root.start_mark, "expected a mapping of keys to values")
        _collect_marks(root, (), marks, file)
        return loader.construct_document(root), marks
    except yaml.MarkedYAMLError as error:
        place = error.problem_mark or error.context_mark
        problem = error.problem or error.context or "unreadable"
        raise _refusal(file, place, f"not valid YAML: {problem}") from error
    except yaml.reader.ReaderError as error:
        before = text[: int(error.position)]
        line, column = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
        message = f"{file}:{line}:{column}: not valid YAML: character U+{int(error.character):04X}"
        raise GymError(ErrorCode.CONFIG_INVALID, message) from error
    except RecursionError as error:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file}: nested too deeply") from error


def read_run_config(folder: Path) -> dict[str, Any]:
    """Return the run's ``config.yaml``.

    Raises:
        GymError: ``FILE_NOT_FOUND`` if there is no run, ``STATE_CORRUPT`` if the file is not a mapping.
    """
    file = folder / "config.yaml"
    if not file.is_file():
        raise GymError(
            ErrorCode.FILE_NOT_FOUND, f"{folder} contains no run", "use a folder written by gym train"
        )
    try:
        config = parse_config(file, read_config_text(file))[0]
    except GymError as error:
        raise GymError(ErrorCode.STATE_CORRUPT, error.message) from error
    if not config:
        raise GymError(ErrorCode.STATE_CORRUPT, f"{file} contains no settings")
    return config


def dotted(path: KeyPath) -> str:
    """Write ``("a", 0, "b")`` as ``a.0.b``."""
    return ".".join(str(k) for k in path)


def _collect_marks(node: yaml.Node, path: KeyPath, marks: dict[KeyPath, Mark], file: Path) -> None:
    """Record the position of every key and item; an alias counts at each use, which bounds its expansion."""
    marks.setdefault(path, _mark(node))
    if len(path) > MAX_DEPTH:
        raise _refusal(file, node.start_mark, f"nested more than {MAX_DEPTH} deep")
    if len(marks) > _MAX_VALUES:
        raise _refusal(file, node.start_mark, f"more than {_MAX_VALUES} values, aliases expanded")
    if isinstance(node, yaml.SequenceNode):
        for index, child in enumerate(node.value):
            _collect_marks(child, (*path, index), marks, file)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str | int] = set()
        for key_node, value_node in node.value:
            key = _key(key_node, path, file)
            if key in seen:
                raise _refusal(file, key_node.start_mark, f"{dotted((*path, key))}: given twice")
            seen.add(key)
            marks[(*path, key)] = _mark(key_node)
            _collect_marks(value_node, (*path, key), marks, file)


def _key(node: yaml.Node, path: KeyPath, file: Path) -> str | int:
    kind = str(node.tag).removeprefix(_TAG)
    if kind == "str":
        return str(node.value)
    if kind == "int" and node.value.isdecimal():
        return int(node.value)
    if kind == "merge":
        message = "merge keys are not supported; write the keys out"
    else:
        message = f"YAML reads this key as {kind}, not as text; put it in quotes"
    raise _refusal(file, node.start_mark, f"{dotted(path) or '(file)'}: {message}")


def _refusal(file: Path, mark: Any, message: str) -> GymError:
    where = f"{file}:{mark.line + 1}:{mark.column + 1}" if mark is not None else str(file)
    return GymError(ErrorCode.CONFIG_INVALID, f"{where}: {message}")


def _mark(node: yaml.Node) -> Mark:
    return node.start_mark.line + 1, node.start_mark.column + 1
