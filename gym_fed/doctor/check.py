"""The base class of checks of `gym doctor`, their findings, and the function that runs all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from gym_fed.core.registries import CHECKS
from gym_fed.core.text import plain


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
    return [finding for name in CHECKS.usable() for finding in _findings(name)]


def _findings(name: str) -> Iterable[Finding]:
    """What a check reports; one of another package that raises is reported itself."""
    try:
        return list(CHECKS.new(name).findings())
    except Exception as error:  # a check of another package may raise anything
        if name in CHECKS.own():
            raise
        what = f"check of a plug-in: {plain(name, 60)}"
        return [Finding(what, Level.FAIL, plain(f"does not run: {error!r}"), "repair or remove the package")]


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level among the findings; ``ok`` when there are none."""
    order = list(Level)
    return max((f.level for f in findings), key=order.index, default=Level.OK)
