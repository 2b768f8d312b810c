"""Check the versions of Python and the core dependencies against the package metadata."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from gym_fed.doctor.check import Check, Finding, Level

DISTRIBUTION = "gym-fed"


class Versions(Check):
    """Check Python first, then the dependencies without extras, in the order of pyproject.toml."""

    def findings(self) -> Iterator[Finding]:
        distribution = installed_distribution()
        if distribution is None:
            yield Finding(
                "version: gym-fed",
                Level.FAIL,
                "the package is on the import path, but not installed",
                "in a checkout: make install; elsewhere: pip install a wheel of it (docs/install.md)",
            )
            return
        yield Finding("version: gym-fed", Level.OK, distribution.version)
        yield judge_python(platform.python_version(), str(distribution.metadata["Requires-Python"]))
        for line in distribution.requires or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield judge_dependency(requirement)


def installed_distribution() -> metadata.Distribution | None:
    """Return the installed distribution, ignoring an ``egg-info`` that a build left in the working directory."""
    distributions = list(metadata.distributions(name=DISTRIBUTION))
    return next((d for d in distributions if d.read_text("RECORD") is not None), None)


def judge_python(version: str, wanted: str) -> Finding:
    """Compare a Python version with ``Requires-Python``."""
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding("version: python", Level.OK, f"{version} (declared: {wanted})")
    remedy = f"make .venv with a Python {wanted}"
    return Finding("version: python", Level.FAIL, f"{version}, but {wanted} is required", remedy)


def judge_dependency(requirement: Requirement) -> Finding:
    """Compare the installed version with the requirement's specifier."""
    name = f"version: {requirement.name}"
    remedy = f"pip install '{requirement}', with -c constraints.txt in a checkout"
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return Finding(name, Level.FAIL, f"not installed, but {requirement.specifier} is required", remedy)
    if requirement.specifier.contains(version, prereleases=True):
        return Finding(name, Level.OK, f"{version} (declared: {requirement.specifier})")
    return Finding(name, Level.FAIL, f"{version}, but {requirement.specifier} is required", remedy)
