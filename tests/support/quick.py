"""Which entries of a registry a long check tries in the quick suite; the others carry the marker `slow`."""

from __future__ import annotations

from collections import defaultdict
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


def mark_beyond_few(items: Iterable[pytest.Item]) -> None:
    """Give ``slow`` to those cases of tests marked ``few(n)`` that the quick suite leaves out.

    Cases that are slow already are not counted.

    Raises:
        pytest.UsageError: For a marker whose ``n`` is not a positive integer, or for a test without parameters.
    """
    groups: dict[tuple[Any, str], list[pytest.Function]] = defaultdict(list)
    numbers: dict[tuple[Any, str], int] = {}
    for item in items:
        if isinstance(item, pytest.Function) and (marker := item.get_closest_marker("few")):
            n = marker.args[0] if marker.args else None
            if type(n) is not int or n < 1 or not hasattr(item, "callspec"):
                raise pytest.UsageError(f"{item.nodeid}: few(n) needs a parametrised test and an n above 0")
            if item.get_closest_marker("slow") is None:
                groups[item.parent, item.originalname].append(item)
                numbers[item.parent, item.originalname] = n
    for test, cases in groups.items():
        n = numbers[test]
        kept = {round(i * (len(cases) - 1) / max(1, n - 1)) for i in range(n)}
        for position, case in enumerate(cases):
            if position not in kept:
                case.add_marker(pytest.mark.slow)


def _values(name: Any) -> tuple[Any, ...]:
    """Of one parameter of a test, or of several at once."""
    return name if isinstance(name, tuple) else (name,)
