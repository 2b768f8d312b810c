"""The formats of `gym export`, from the registry: for `--help`, and the table of `--list`."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click
from typer.core import TyperCommand

from gym_fed.console import out, print_columns
from gym_fed.errors import GymError
from gym_fed.kinds import EXPORT_FORMATS

if TYPE_CHECKING:
    from gym_fed.export.formats.base import ExportFormat


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


def formats() -> list[dict[str, Any]]:
    """Every format: ``format``, ``writes``, ``quantizations``, ``read_by``, ``suffix``, ``needs``, ``missing``."""
    return [_row(name) for name in EXPORT_FORMATS.names()]


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


def _row(name: str) -> dict[str, Any]:
    try:
        chosen: type[ExportFormat] = EXPORT_FORMATS.type_of(name)
    except GymError as error:
        why = f"cannot be used: {error.message}"
        return {
            "format": name, "writes": why, "quantizations": [], "read_by": "", "suffix": "", "needs": [], "missing": [],
        }  # fmt: skip
    import sys

    there = ", which reads the folder; what it is for is not run here" if chosen.unchecked else ""
    text = (sys.modules[chosen.__module__].__doc__ or "").split("\n\n")[0]
    return {
        "format": name,
        "writes": " ".join(text.replace("`", "").split()),
        "quantizations": list(chosen.quantizations),
        "read_by": f"{chosen.reader}{there}",
        "suffix": chosen.suffix,
        "needs": [module.replace("_", "-") for module in chosen.requires],
        "missing": [module.replace("_", "-") for module in chosen.requires if find_spec(module) is None],
    }


def _with_quantizations(row: dict[str, Any]) -> str:
    return (
        f"{row['writes']} [{', '.join(row['quantizations'])}]" if row["quantizations"] else str(row["writes"])
    )
