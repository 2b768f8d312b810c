"""The table of `gym export --list`."""

from __future__ import annotations

from typing import Any

from gym_fed.core.console import print_columns
from gym_fed.export.listing import formats


def print_formats() -> None:
    """The table of `gym export --list`."""
    lines: list[tuple[str, str]] = []
    for row in formats():
        lacks = f" (not here: {', '.join(row['missing'])})" if row["missing"] else ""
        facts = [
            f"read back by {row['read_by']}" if row["read_by"] else "",
            f"-o NAME{row['suffix']}" if row["suffix"] else "",
        ]
        facts.append(f"needs {', '.join(row['needs'])}{lacks}" if row["needs"] else "")
        lines += [(row["format"], _with_quantizations(row)), ("", "; ".join(fact for fact in facts if fact))]
    print_columns(lines, wrapped=True)


def _with_quantizations(row: dict[str, Any]) -> str:
    return (
        f"{row['writes']} [{', '.join(row['quantizations'])}]" if row["quantizations"] else str(row["writes"])
    )
