"""The base class of checks of `gym doctor`, their findings, and the function that runs them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from gym_fed.core.registries import CHECKS
from gym_fed.core.text import plain


class Level(StrEnum):
    """Severity of a finding; ``fail`` makes `gym doctor` exit with code 1."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        check: The item checked, such as ``version: torch``.
        level: The severity.
        finding: The result, with its value.
        remedy: The remedy; given unless the level is ``ok``.
    """

    check: str
    level: Level
    finding: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.level is not Level.OK and not self.remedy:
            raise ValueError(f"finding {self.check!r} is {self.level.value} but has no remedy")

    def to_dict(self) -> dict[str, str]:
        """Return the values for ``--json``."""
        return asdict(self)


class Check(ABC):
    """A check of one part of the installation."""

    @abstractmethod
    def findings(self) -> Iterable[Finding]:
        """Return one finding per checked item."""


def run_checks() -> list[Finding]:
    """Run all checks, sorted by name; takes seconds, since torch is imported to list devices."""
    return [finding for name in CHECKS.usable() for finding in _findings(name)]


def _findings(name: str) -> Iterable[Finding]:
    """Run a check; if one of another package raises, that is reported as a finding."""
    try:
        return list(CHECKS.new(name).findings())
    except Exception as error:  # a check of another package may raise anything
        if name in CHECKS.own():
            raise
        subject = f"check of a plug-in: {plain(name, 60)}"
        problem = plain(f"does not run: {error!r}")
        return [Finding(subject, Level.FAIL, problem, "repair or remove the package")]


def worst(findings: Sequence[Finding]) -> Level:
    """Return the worst level among the findings; ``ok`` without findings."""
    order = list(Level)
    return max((f.level for f in findings), key=order.index, default=Level.OK)
