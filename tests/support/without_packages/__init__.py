"""A Python to which some installed packages are not there; see ``sitecustomize.py``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TRAINER = ("accelerate", "datasets", "datasketch", "optuna", "peft", "tensorboard", "trl")
"""What ``requirements-hub.txt`` leaves out."""


def with_only(lines: Iterable[str]) -> dict[str, str]:
    """Added to its environment, a Python finds these requirements, theirs and the project, and no other package."""
    kept = {"gym-fed"}
    waiting = [Requirement(line) for line in lines]
    while waiting:
        row = waiting.pop()
        known = canonicalize_name(row.name)
        if known in kept and not row.extras:
            continue
        kept.add(known)
        try:
            below = [Requirement(line) for line in requires(known) or ()]
        except PackageNotFoundError:  # for another system or Python
            continue
        extras = ["", *row.extras]
        waiting += [
            one
            for one in below
            if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)
        ]
    others = {
        module
        for module, names in _distributions().items()
        if not kept & {canonicalize_name(name) for name in names}
    }
    return {"PYTHONPATH": str(Path(__file__).parent), "GYM_TESTS_WITHOUT": ",".join(sorted(others))}


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """The distributions of each module; reading them takes half a second."""
    return packages_distributions()
