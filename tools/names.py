"""Writes the tables of docs/names.md from the words that ``gym_fed.interop`` knows; `--check` only compares."""

from __future__ import annotations

import sys
from pathlib import Path

from gym_fed.interop.row import BroughtWord
from gym_fed.interop.words import NEAR, NEAR_MEMBERS, rows

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "names.md"
BEGIN, END = "<!-- from gym_fed/interop, by tools/names.py -->\n", "<!-- until here -->\n"


def page() -> str:
    """The page as it should be."""
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def tables() -> str:
    """What runs, what is refused, and what an error names."""
    known = list(rows())
    parts = [
        _table(f"### {where}", [r for r in known if r.where == where and not r.refused]) for where in _WHERES
    ]
    parts.append(_table("### Refused", [row for row in known if row.refused]))
    parts.append("### Named in the error\n\n| elsewhere | here |\n|---|---|")
    near = [(theirs, ours) for theirs, ours in sorted(NEAR["TrainingConfig"].items())]
    near += [
        (f"{kind} {theirs}", ours) for kind, names in NEAR_MEMBERS.items() for theirs, ours in names.items()
    ]
    parts[-1] += "".join(f"\n| `{theirs}` | `{ours}` |" for theirs, ours in near) + "\n"
    return "\n".join(parts)


_WHERES = ("Python", "command", "YAML")


def _table(title: str, found: list[BroughtWord]) -> str:
    lines = [f"{title}\n", "| elsewhere | here |", "|---|---|"]
    for row in found:
        instead = "".join(f"<br>`{line}`" for line in row.instead)
        lines.append(f"| `{_cell(row.theirs)}` | {_cell(row.ours)}{_cell(instead)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    wanted = page()
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != wanted)
    PAGE.write_text(wanted, encoding="utf-8")
