"""Task definitions of lm-evaluation-harness, read from its YAML files without importing ``lm_eval``.

A ``!function`` in a definition is a name whose Python file is imported on the first call. A function that gym-fed
replaces is never imported, so that importing its file cannot download anything.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import file_sha256
from gym_fed.evaluation.suites.own_file import read_task_file
from gym_fed.evaluation.suites.row_files import read_rows
from gym_fed.evaluation.suites.store import ASSETS, listing, split_path

_DROPPED = ("include", "tag", "group", "task_list")
_MAX_INCLUDES = 8


@dataclass(frozen=True)
class HarnessFunction:
    """A function of the harness, by file and name.

    Attributes:
        folder: The folder of the definition that names it.
        name: ``module.function``, with the module's path from ``folder``.
    """

    folder: Path
    name: str

    @property
    def file(self) -> Path:
        """The module's file."""
        module = self.name.rpartition(".")[0]
        return (self.folder / f"{module.replace('.', '/')}.py").resolve()

    def callable(self) -> Callable[..., Any]:
        """Return a callable that imports its file on first use, since that takes seconds.

        Raises:
            GymError: ``MISSING_DEPENDENCY`` if the harness lacks the file or, when called, the function.
        """
        if not self.file.is_file():
            raise _unsupported_harness(f"{self.file}: no such file, needed by {self.name}")

        def call(*values: Any, **named: Any) -> Any:
            return self._load()(*values, **named)

        call.__name__ = self.name.rpartition(".")[2]
        return call

    def _load(self) -> Any:
        try:
            return getattr(_module(self.file), self.name.rpartition(".")[2])
        except (ImportError, OSError, AttributeError) as error:
            raise _unsupported_harness(f"{self.file}: {self.name} cannot be loaded: {error}") from error


def has_harness() -> bool:
    """Return True if lm-evaluation-harness is installed."""
    return importlib.util.find_spec("lm_eval") is not None


def _harness_folder() -> Path:
    """Return the folder ``lm_eval/tasks`` of the installed harness.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` if it is not installed.
    """
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or spec.origin is None:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            "lm-evaluation-harness, which defines the tasks, is not installed",
            "pip install 'gym-fed[eval]'",
        )
    return Path(spec.origin).parent / "tasks"


@cache
def read_definition(file: Path) -> Mapping[str, Any]:
    """Read a definition with its includes, without groups; functions stay names.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` for a file that is missing or cannot be read, for example in a different
            version of the harness.
    """
    return {key: value for key, value in _read(file, 0).items() if key not in _DROPPED}


def _read(file: Path, depth: int) -> dict[str, Any]:
    try:
        if depth > _MAX_INCLUDES:
            raise ValueError("includes itself")
        definition = yaml.load(file.read_bytes(), Loader=_loader(file.parent))
        if not isinstance(definition, dict):
            raise ValueError("not a mapping")
        includes = definition.get("include", [])
        merged: dict[str, Any] = {}
        for name in includes if isinstance(includes, list) else [includes]:
            merged.update(_read(file.parent / name, depth + 1))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise _unsupported_harness(f"{file}: cannot be read: {error}") from error
    return {**merged, **definition}


def _loader(folder: Path) -> Any:
    """Create a YAML loader for the harness's files that replaces functions with names."""
    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    loader: Any = type("_Loader", (base,), {})
    loader.add_constructor("!function", lambda load, node: HarnessFunction(folder, str(node.value)))
    return loader


def resolved(value: Any) -> Any:
    """Return a copy with callable functions."""
    if isinstance(value, HarnessFunction):
        return value.callable()
    if isinstance(value, Mapping):
        return {key: resolved(item) for key, item in value.items()}
    return [resolved(item) for item in value] if isinstance(value, list) else value


def named(value: Any) -> Any:
    """Return a copy for a digest, with each function replaced by its name and the digest of its file."""
    if isinstance(value, HarnessFunction):
        place = f"{value.folder.name}/{value.name}"
        return {"function": place, "sha256": file_sha256(value.file)}
    if isinstance(value, Mapping):
        return {str(key): named(item) for key, item in value.items()}
    return [named(item) for item in value] if isinstance(value, list) else value


@cache
def _module(file: Path) -> Any:
    name = f"_gym_fed_harness_{file.parent.name}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module at {file}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _unsupported_harness(message: str) -> GymError:
    return GymError(
        ErrorCode.MISSING_DEPENDENCY,
        message,
        "install the harness that gym-fed is tested with: pip install 'gym-fed[eval]'",
    )


@cache
def members(entry_name: str) -> Mapping[str, tuple[str | None, Mapping[str, Any]]]:
    """Return name, subset and definition of each task of a registry entry, without loading functions.

    Raises:
        GymError: ``MISSING_DEPENDENCY`` if the definitions are the harness's and it is not installed.
    """
    entry = listing().tasks[entry_name]
    if entry.file is not None:
        task = read_task_file(ASSETS / entry.file)
        definition = {**task.definition(), "grade": task.grade}
        if entry.each == "task":
            folder = str(listing().datasets[str(entry.dataset)].package)
            rows = read_rows(ASSETS / split_path(folder, entry.subset, "test"))
            names = dict.fromkeys(row["task"] for row in rows)
            return {f"{entry.dataset}_{name}": (entry.subset, {**definition, "only": name}) for name in names}
        if entry.each == "pair":
            return {f"{entry_name}_{pair}": (pair, definition) for pair in entry.pairs}
        return {entry_name: (entry.subset, definition)}
    assert entry.harness is not None
    files = sorted(_harness_folder().glob(entry.harness))
    if not files:
        raise _unsupported_harness(
            f"{entry_name}: the installed lm-evaluation-harness has no {entry.harness}"
        )
    tasks: dict[str, tuple[str | None, Mapping[str, Any]]] = {}
    for file in files:
        definition = {**read_definition(file), "grade": entry.grade}
        subset = entry.subset if "subset" in entry.model_fields_set else definition.get("dataset_name")
        tasks[str(definition["task"])] = (subset, definition)
    return tasks
