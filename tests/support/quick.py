"""Which entries of a registry a long check tries in the quick suite; the others carry the marker `slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def quick(names: Iterable[Any], *tried: Any) -> list[Any]:
    """Parameters of a test: ``names``, of which all but ``tried`` are for `make test-all`."""
    listed = list(names)
    unknown = set(tried) - set(listed)
    if unknown:
        raise ValueError(f"{sorted(unknown)} are not among {listed}")
    return [
        name if name in tried else pytest.param(*_values(name), marks=pytest.mark.slow) for name in listed
    ]


def first_of_each(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters of a test: of the ``cases`` with the same first value, all but the first are for `make test-all`."""
    parameters, seen = [], set()
    for case in cases:
        parameters.append(pytest.param(*case, marks=[pytest.mark.slow] if case[0] in seen else []))
        seen.add(case[0])
    return parameters


def _values(name: Any) -> tuple[Any, ...]:
    """Of one parameter of a test, or of several at once."""
    return name if isinstance(name, tuple) else (name,)
