"""The registry of `gym doctor`'s checks: functions without arguments that give findings."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Sequence

from gym_fed.doctor.finding import Finding, Level

Check = Callable[[], Iterable[Finding]]

_CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check under its function's name."""
    if _CHECKS.get(function.__name__, function) is not function:
        raise ValueError(f"two checks of `gym doctor` are called {function.__name__!r}")
    _CHECKS[function.__name__] = function
    return function


def checks() -> dict[str, Check]:
    """Every check by name, in the order of their modules' names."""
    package = importlib.import_module("gym_fed.doctor.checks")
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        importlib.import_module(f"{package.__name__}.{module}")
    return dict(sorted(_CHECKS.items(), key=lambda item: item[1].__module__))


def run_checks() -> list[Finding]:
    """Run all of them; takes seconds, for torch is imported to ask it for devices."""
    return [finding for function in checks().values() for finding in function()]


def worst(findings: Sequence[Finding]) -> Level:
    """The worst level among the findings; ``ok`` when there are none."""
    order = list(Level)
    return max((f.level for f in findings), key=order.index, default=Level.OK)
