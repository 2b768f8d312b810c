"""Parse config files, and define the dialects of other tools' config files.

A dialect recognises a file of another tool and translates its keys. Dialects are loaded from the entry point group
``gym_fed.dialects``; this module does not depend on them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

from gym_fed.config.yaml.strict import KeyPath, Mark, parse_config, read_config_text
from gym_fed.core.requirements import load_installed

Job = Literal["train", "predict", "evaluate", "preprocess", "export", "inference"]
_GROUP = "gym_fed.dialects"


@dataclass(frozen=True)
class ParsedConfig:
    """A parsed YAML file.

    Attributes:
        file: Its path, for messages.
        values: Plain values, not validated. YAML aliases share a value, so copy before writing.
        marks: Line and column of every key and item.
    """

    file: Path
    values: dict[str, Any]
    marks: dict[KeyPath, Mark]

    @classmethod
    def read(cls, file: ParsedConfig | str | Path) -> ParsedConfig:
        """Read and parse a file; return a parsed one unchanged.

        Raises:
            GymError: ``FILE_NOT_FOUND`` or ``CONFIG_INVALID``; see ``parse_config``.
        """
        if isinstance(file, ParsedConfig):
            return file
        return cls.parse(Path(file), read_config_text(Path(file)))

    @classmethod
    def parse(cls, file: Path, text: str) -> ParsedConfig:
        """Parse text that was read from ``file``.

        Raises:
            GymError: ``CONFIG_INVALID``; see ``parse_config``.
        """
        return cls(file, *parse_config(file, text))

    @cached_property
    def dialect(self) -> Dialect | None:
        """The file's dialect; None for gym-fed's own keys."""
        return dialect_of(self.values)

    def mark(self, key: str) -> Mark:
        """Return the line and column of a dotted key, or of the section that would contain it."""
        path: KeyPath = tuple(key.split("."))
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path, (1, 1))

    def place(self, key: str) -> str:
        """Return ``file:line:column`` of a dotted key."""
        line, column = self.mark(key)
        return f"{self.file}:{line}:{column}"


class Dialect(Protocol):
    """The config format of another tool.

    Attributes:
        title: The tool's name in messages, such as ``LLaMA-Factory``.
    """

    title: str

    def matches(self, values: Mapping[str, Any]) -> bool:
        """Return True if these values come from a file of this tool."""
        ...

    def job_of(self, values: dict[str, Any]) -> Job:
        """Return the command that the file configures."""
        ...

    def translate(self, values: dict[str, Any], job: Job, processes: int | None = None) -> Translation:
        """Translate the values of a file.

        Args:
            values: The file's values; they are not changed.
            job: Command whose keys to write: ``train`` (the keys of TrainingConfig), ``predict`` (PredictConfig),
                ``export`` (model, adapters, output) or ``inference`` (model, adapters, sampling).
            processes: Number of processes of the run; None if unknown.
        """
        ...


@dataclass
class Translation:
    """The translated keys of another tool's file.

    Attributes:
        values: Values by gym-fed's keys, before validation.
        origins: Original key in the file, by translated key.
        notes: Keys of the file with remarks; they do not affect the result of training.
        lost: Keys of the file that affect the result but have no counterpart, with reasons.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


@functools.cache
def dialects() -> tuple[Dialect, ...]:
    """Return all installed dialects that can be imported, sorted by entry point name."""
    return load_installed(_GROUP)


def dialect_of(values: Mapping[str, Any]) -> Dialect | None:
    """Return the dialect of a config's values; None for gym-fed's own keys."""
    return next((dialect for dialect in dialects() if dialect.matches(values)), None)
