"""Report on the tasks that the base knew: which were kept, and which got worse."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from gym_fed.core.console import TextTable
from gym_fed.core.text import counted

ERRORS = 2
"""A task counts as lost where it fell by more than this many standard errors: twenty tasks are compared at once."""
WHY = (
    "Why: the base has {weights:,} weights, and its tasks use all of them: a new task overwrites part of the others.\n"
    "What helps: a larger base, or one variant per task (gym variant create), which leaves the base as it is."
)


def paired_error(base: Sequence[bool], merged: Sequence[bool]) -> float:
    """Standard error of the change in accuracy, where both models answered the same rows."""
    changes = [after - before for before, after in zip(base, merged, strict=True)]
    mean = sum(changes) / len(changes)
    return math.sqrt(
        sum((change - mean) ** 2 for change in changes) / len(changes) / max(1, len(changes) - 1)
    )


def lost_tasks(tasks: Mapping[str, Any]) -> list[str]:
    """Names of the base's tasks that fell by more than ``ERRORS`` standard errors, the largest fall first."""
    falls = {
        name: found["base"]["accuracy"] - found["merged"]["accuracy"]
        for name, found in tasks.items()
        if found["taught_by"] is None
        and found["base"]["accuracy"] - found["merged"]["accuracy"] > ERRORS * found["error"]
    }
    return sorted(falls, key=lambda name: -falls[name])


def kept_table(tasks: Mapping[str, Any]) -> TextTable:
    """Accuracy of every task of the base before and after, with the standard error of the change."""
    table = TextTable(title="kept: accuracy on unseen examples of the base's own tasks")
    for column in ("task", "base -> merged", "change", "standard error", "rows"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for name, found in tasks.items():
        if found["taught_by"] is None:
            base, merged = found["base"]["accuracy"], found["merged"]["accuracy"]
            table.add_row(
                name,
                f"{base:.0%} -> {merged:.0%}",
                f"{100 * (merged - base):+.0f}",
                f"{100 * found['error']:.1f}",
                str(found["num_rows"]),
            )
    return table


def kept_lines(tasks: Mapping[str, Any], weights: int) -> list[str]:
    """The result in words: the mean over the base's tasks, those that were lost, why, and what helps."""
    old = [found for found in tasks.values() if found["taught_by"] is None]
    base, merged = (sum(found[which]["accuracy"] for found in old) / len(old) for which in ("base", "merged"))
    lines = [f"mean of the base's {counted(len(old), 'task')}: {base:.1%} -> {merged:.1%}"]
    lost = lost_tasks(tasks)
    if not lost:
        return [*lines, f"lost: none fell by more than {ERRORS} standard errors"]
    falls = (
        f"{name} {100 * tasks[name]['base']['accuracy']:.0f} -> {100 * tasks[name]['merged']['accuracy']:.0f}"
        for name in lost
    )
    return [*lines, f"lost: {', '.join(falls)}", *WHY.format(weights=weights).split("\n")]
