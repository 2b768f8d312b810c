"""What a check of `gym doctor` is, and all of them run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from gym_fed.doctor.finding import Finding, Level
from gym_fed.errors import GymError
from gym_fed.kinds import CHECKS


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
