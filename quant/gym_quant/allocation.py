"""Mixed precision: which codec each tensor gets, so that the summed error is small within a byte budget.

The classic of Shoham and Gersho 1988, "Efficient bit allocation for an arbitrary set of quantizers": keep the lower
convex hull of every tensor's (bytes, error) options, then spend the budget step by step along the hulls, always where
a byte buys the most. Where it stops, the result is the best of all for the bytes it spends; the error is above the
true optimum of the whole budget by less than the one step that did not fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

Option = tuple[int, float]
"""Bytes of a payload, and the squared error it leaves."""


def allocate(options: Mapping[str, Sequence[Option]], budget_bytes: int) -> dict[str, int] | None:
    """Choose one option of every tensor.

    Args:
        options: Name to the tensor's options; errors must be finite.
        budget_bytes: What all chosen options together may take.

    Returns:
        Name to the index of its option, or None when not even the smallest options fit together.
    """
    hulls = {name: hull(found) for name, found in options.items()}
    at = dict.fromkeys(hulls, 0)
    spent = sum(options[name][steps[0]][0] for name, steps in hulls.items())
    if spent > budget_bytes:
        return None
    steps = sorted(
        (-_gain(options[name], here, there), name, place)
        for name, steps in hulls.items()
        for place, (here, there) in enumerate(itertools.pairwise(steps))
    )
    for _, name, place in steps:
        found, path = options[name], hulls[name]
        more = found[path[place + 1]][0] - found[path[place]][0]
        if at[name] == place and spent + more <= budget_bytes:
            at[name], spent = place + 1, spent + more
    return {name: hulls[name][place] for name, place in at.items()}


def hull(found: Sequence[Option]) -> list[int]:
    """Indices of the options on the lower convex hull of error over bytes, the smallest first."""
    best: list[int] = []
    for index in sorted(range(len(found)), key=lambda i: (found[i], i)):
        if best and found[index][1] >= found[best[-1]][1]:
            continue
        while len(best) > 1 and _gain(found, best[-2], best[-1]) <= _gain(found, best[-1], index):
            best.pop()
        if best and found[best[-1]][0] == found[index][0]:
            best.pop()
        best.append(index)
    return best


def _gain(found: Sequence[Option], here: int, there: int) -> float:
    """Error that a byte removes between two options."""
    return (found[here][1] - found[there][1]) / max(1, found[there][0] - found[here][0])
