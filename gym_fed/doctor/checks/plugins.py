"""Check the plug-ins of installed packages."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

from gym_quant.registry import MemberError, Registry

from gym_fed.core.errors import GymError
from gym_fed.core.registries import ALL
from gym_fed.core.text import plain
from gym_fed.doctor.check import Check, Finding, Level


class Plugins(Check):
    """Import every plug-in; report nothing if there are none."""

    def findings(self) -> Iterator[Finding]:
        for kind in ALL:
            for name in (name for name in kind.names() if name not in kind.own()):
                yield judge_plugin(kind, name)
            for point in kind.shadowed():
                yield judge_shadowed(kind.kind, point)


def judge_plugin(kind: Registry[Any], name: str) -> Finding:
    """Check one plug-in."""
    subject = f"plug-in: {kind.kind} {plain(name, 60)}"
    try:
        origin = kind.origin(name)
        kind.type_of(name)
    except (GymError, MemberError) as error:
        message, hint = (error.message, error.hint) if isinstance(error, GymError) else (str(error), None)
        return Finding(subject, Level.FAIL, plain(message), plain(hint or "repair or remove the package"))
    assert origin is not None
    whose = plain(f"{origin.distribution} {origin.version}", 120)
    return Finding(subject, Level.OK, f"{whose}, sha256 {origin.digest[:16]}")


def judge_shadowed(kind: str, point: EntryPoint) -> Finding:
    """Warn about an entry point that is ignored, because a built-in member has its name."""
    whose = "a package" if point.dist is None else f"{point.dist.name} {point.dist.version}"
    problem = plain(
        f"{whose} adds {point.value}, which is ignored: gym-fed has its own {kind} {point.name!r}"
    )
    remedy = "ask the package's author to rename it, or remove the package"
    return Finding(f"plug-in: {kind} {plain(point.name, 60)}", Level.WARN, problem, remedy)
