"""Mixed precision: choose a codec per tensor that minimises the summed error within a byte budget.

The method is that of Shoham and Gersho 1988, "Efficient bit allocation for an arbitrary set of quantizers": keep the
lower convex hull of every tensor's (bytes, error) options, then spend the budget in steps along the hulls, always on
the step that removes the most error per byte. The result is optimal for the bytes that it spends; its error exceeds the
optimum for the whole budget by less than the error that the first step that does not fit would remove.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Option = tuple[int, float]
"""An option for a tensor: the bytes of its payload and the squared error."""


Picks = dict[str, int]
"""A mapping from a tensor's name to the index of its option."""

_Step = tuple[float, str, int]
"""A step: the negated error removed per byte, the tensor's name, and the position on its hull."""


def allocate(
    options: Mapping[str, Sequence[Option]],
    budget_bytes: int,
    size: Callable[[Picks], int] | None = None,
    tries: int = 1,
) -> Picks | None:
    """Choose one option per tensor.

    Args:
        options: Options of each tensor by name; errors must be finite.
        budget_bytes: Maximum size in bytes of all chosen options together.
        size: Function that returns the total bytes of a choice, if that is not the sum (as for a file); it must grow
            with every step.
        tries: Number of attempts. A large tensor whose first step barely does not fit would get no step, so the second
            attempt first takes the worst first step, the third the two worst, and so on. The first attempt with the
            least error wins.

    Returns:
        The chosen option's index by name; None if even the smallest options exceed the budget.
    """
    hulls = {name: hull(picks) for name, picks in options.items()}
    plan = _SplitPlan(options, hulls, budget_bytes, size)
    if plan.size(dict.fromkeys(hulls, 0)) > budget_bytes:
        return None
    steps = sorted(
        (-_gain(options[name], here, there), name, place)
        for name, steps in hulls.items()
        for place, (here, there) in enumerate(itertools.pairwise(steps))
    )
    if plan.size(plan.after(steps)) <= budget_bytes:
        return plan.picks(plan.after(steps))
    first = [step for step in steps if step[2] == 0]
    best, most = plan.picks({}), 0.0
    for num_taken in range(min(tries, max(1, len(first)))):
        at_once = first[len(first) - num_taken :]
        picks = plan.picks(plan.filled([*at_once, *(step for step in steps if step not in at_once)]))
        removed = math.fsum(options[n][hulls[n][0]][1] - options[n][i][1] for n, i in picks.items())
        if removed > most:
            best, most = picks, removed
    return best


@dataclass(frozen=True)
class _SplitPlan:
    """The hulls of all tensors, and the steps along them; ``at`` maps names to positions, 0 if absent."""

    options: Mapping[str, Sequence[Option]]
    hulls: Mapping[str, list[int]]
    budget_bytes: int
    measure: Callable[[Picks], int] | None

    def picks(self, at: Picks) -> Picks:
        return {name: path[at.get(name, 0)] for name, path in self.hulls.items()}

    def size(self, at: Picks) -> int:
        picks = self.picks(at)
        if self.measure is not None:
            return self.measure(picks)
        return sum(self.options[name][index][0] for name, index in picks.items())

    def after(self, steps: Sequence[_Step]) -> Picks:
        return {name: place + 1 for _, name, place in steps}

    def filled(self, steps: Sequence[_Step]) -> Picks:
        """Take steps in order while they fit, then each later one that fits into the remaining budget."""
        low, high = 0, len(steps)
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.size(self.after(steps[:middle])) <= self.budget_bytes
            low, high = (middle, high) if fits else (low, middle)
        at = self.after(steps[:low])
        spent = self.size(at)
        for _, name, place in steps[low:]:
            options, path = self.options[name], self.hulls[name]
            more = options[path[place + 1]][0] - options[path[place]][0]
            if at.get(name, 0) == place and spent + more <= self.budget_bytes:
                grown = {**at, name: place + 1}
                if self.measure is None:
                    at, spent = grown, spent + more
                elif (whole := self.size(grown)) <= self.budget_bytes:
                    at, spent = grown, whole
        return at


def hull(options: Sequence[Option]) -> list[int]:
    """Return indices of the options on the lower convex hull of error over bytes, smallest first."""
    best: list[int] = []
    for index in sorted(range(len(options)), key=lambda i: (options[i], i)):
        if best and options[index][1] >= options[best[-1]][1]:
            continue
        while len(best) > 1 and _gain(options, best[-2], best[-1]) <= _gain(options, best[-1], index):
            best.pop()
        if best and options[best[-1]][0] == options[index][0]:
            best.pop()
        best.append(index)
    return best


def _gain(options: Sequence[Option], here: int, there: int) -> float:
    """Return the error that one option removes per byte over another."""
    return (options[here][1] - options[there][1]) / max(1, options[there][0] - options[here][0])
