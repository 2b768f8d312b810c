"""What a check of `gym doctor` reports: one line on one thing, and the remedy where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad a finding is; ``fail`` makes `gym doctor` end with exit code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        check: What was looked at, such as ``version: torch``.
        level: How bad it is.
        finding: What was seen, with its value.
        remedy: What to do about it; given whenever the level is not ``ok``.
    """

    check: str
    level: Level
    finding: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.level is not Level.OK and not self.remedy:
            raise ValueError(f"finding {self.check!r} is {self.level.value} but names no remedy")

    def to_dict(self) -> dict[str, str]:
        """The form of ``--json``."""
        return {
            "check": self.check,
            "level": self.level.value,
            "finding": self.finding,
            "remedy": self.remedy,
        }
