"""What a check of `gym doctor` is, what it reports, and all of them run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from gym_fed.errors import GymError
from gym_fed.kinds import CHECKS


class Level(StrEnum):
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
        return asdict(self)


class Check(ABC):
    """Looks at one part of the installation."""

    @abstractmethod
    def findings(self) -> Iterable[Finding]:
        """A line on each thing that it looked at."""


def run_checks() -> list[Finding]:
    """Run all of them by name; takes seconds, for torch is imported to ask it for devices."""
    return [finding for check in _checks() for finding in check().findings()]


def _checks() -> Iterator[type[Check]]:
    for name in CHECKS.names():
        try:
            yield CHECKS.type_of(name)
        except GymError:
            if name in CHECKS.own():
                raise  # one of another package that cannot be used is what the check ``plugins`` reports


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level among the findings; ``ok`` when there are none."""
    order = list(Level)
    return max((f.level for f in findings), key=order.index, default=Level.OK)
