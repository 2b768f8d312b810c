"""Names of other projects that run here, and ours for each: `gym docs aliases`."""

from __future__ import annotations

from gym_fed.cli.reference._markdown import cell
from gym_fed.interop.row import BroughtWord
from gym_fed.interop.words import NEAR, NEAR_MEMBERS, rows

_WHERES = ("Python", "command", "YAML")
_INTRODUCTION = """\
# Aliases

Names of other projects that run here as they are typed, those that are refused, and those that an error answers with
ours. How they work: [names from other tools](names.md).
"""


def page() -> str:
    """A table for each place where a name is written, then the refused names and those that only an error knows."""
    known = list(rows())
    parts = [_INTRODUCTION]
    parts += [
        _table(f"## {where}", [r for r in known if r.where == where and not r.refused]) for where in _WHERES
    ]
    parts.append(_table("## Refused", [row for row in known if row.refused]))
    parts.append("## Named in the error\n\n| elsewhere | here |\n|---|---|")
    near = [(theirs, ours) for theirs, ours in sorted(NEAR["TrainingConfig"].items())]
    near += [
        (f"{kind} {theirs}", ours) for kind, names in NEAR_MEMBERS.items() for theirs, ours in names.items()
    ]
    parts[-1] += "".join(f"\n| `{theirs}` | `{ours}` |" for theirs, ours in near) + "\n"
    return "\n".join(parts)


def _table(title: str, words: list[BroughtWord]) -> str:
    lines = [f"{title}\n", "| elsewhere | here |", "|---|---|"]
    for row in words:
        instead = "".join(f"<br>`{line}`" for line in row.instead)
        lines.append(f"| `{cell(row.theirs)}` | {cell(row.ours)}{cell(instead)} |")
    return "\n".join(lines) + "\n"
