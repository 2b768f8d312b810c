"""A config file, read and parsed once, before it is validated."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gym_fed.config.dialect import Dialect, dialect_of
from gym_fed.config.yaml.strict import KeyPath, Mark, parse_config, read_config_text


@dataclass(frozen=True)
class ParsedConfig:
    """A parsed YAML file.

    Attributes:
        file: Its path, for messages.
        values: Plain values, not validated. Aliases share a value: copy before writing.
        marks: Line and column of every key and item.
    """

    file: Path
    values: dict[str, Any]
    marks: dict[KeyPath, Mark]

    @classmethod
    def read(cls, file: ParsedConfig | str | Path) -> ParsedConfig:
        """Read and parse a file; a parsed one is returned as it is.

        Raises:
            GymError: ``FILE_NOT_FOUND`` or ``CONFIG_INVALID``; see ``parse_config``.
        """
        if isinstance(file, ParsedConfig):
            return file
        return cls.parse(Path(file), read_config_text(Path(file)))

    @classmethod
    def parse(cls, file: Path, text: str) -> ParsedConfig:
        """Parse a text that was read from ``file``.

        Raises:
            GymError: ``CONFIG_INVALID``; see ``parse_config``.
        """
        return cls(file, *parse_config(file, text))

    @cached_property
    def dialect(self) -> Dialect | None:
        """The dialect of another tool that the file is written in; None for our own keys."""
        return dialect_of(self.values)

    def mark(self, key: str) -> Mark:
        """Return the line and column of a dotted key, or of the section that would hold it."""
        path: KeyPath = tuple(key.split("."))
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path, (1, 1))

    def place(self, key: str) -> str:
        """Return ``file:line:column`` of a dotted key."""
        line, column = self.mark(key)
        return f"{self.file}:{line}:{column}"
