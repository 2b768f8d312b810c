"""The formats of `gym export`: for `--help`, and the table of `--list`."""

from __future__ import annotations

from typing import Any

import click
from typer.core import TyperCommand

from gym_fed.core.console import out, print_columns
from gym_fed.export.listing import formats


class NamesFormats(TyperCommand):
    """A command whose help ends with the formats; they are imported only then."""

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The help, and the formats."""
        super().format_help(ctx, formatter)
        out.print(
            "Formats, with their quantizations (the first is the default); gym export --list shows more:"
        )
        print_columns([(row["format"], _with_quantizations(row)) for row in formats()], wrapped=True)
        out.print()


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
