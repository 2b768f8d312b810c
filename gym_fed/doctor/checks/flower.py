"""Check that Flower's telemetry is off. By default it reports to its own hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from gym_fed.core.library_env import VARIABLES
from gym_fed.doctor.check import Check, Finding, Level


class Flower(Check):
    """Check telemetry, update check and runtime installs in gym-fed's processes."""

    def findings(self) -> Iterator[Finding]:
        yield judge_environment(os.environ)


def judge_environment(environment: Mapping[str, str]) -> Finding:
    """Warn unless all of Flower's switches are off."""
    export = "export " + " ".join(f"{name}={value}" for name, value in VARIABLES.items())
    differing = [name for name, value in VARIABLES.items() if environment.get(name) != value]
    if differing:
        problem = "; ".join(f"{name} is {environment.get(name, 'unset')}" for name in differing)
        return Finding("flower: outside calls", Level.WARN, problem, export)
    seen = "telemetry, update check and installs are off in gym-fed's own processes"
    return Finding("flower: outside calls", Level.OK, seen, export)
