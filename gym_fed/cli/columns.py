"""Rows of cells in columns as wide as they need; the terminal wraps what is too long, and pipes get whole lines."""

from __future__ import annotations

from collections.abc import Sequence

from gym_fed import console


def print_columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), indent: str = "  ") -> None:
    """Print rows on standard output; columns whose number is in ``right`` are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        console.out.print(f"{indent}{'  '.join(cells).rstrip()}")
