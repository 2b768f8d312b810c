"""`gym api usage`: tokens by caller, user and month."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated

import typer

from gym_fed.core.console import AsJson, err, out, print_json, print_table
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""First characters that make a spreadsheet evaluate a cell as a formula; users choose their names."""
_COLUMNS = ("month", "key", "user", "requests", "prompt_tokens", "completion_tokens", "tokens")


def usage(
    file: Annotated[Path, typer.Argument(help="The file of usage_log in serving.yaml.", show_default=False)],
    month: Annotated[
        str | None, typer.Option(metavar="YYYY-MM", help="Restrict to a month, in UTC.", show_default="all")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, for a spreadsheet.")] = False,
    as_json: AsJson = False,
) -> None:
    """Sum the tokens of each key and user by month."""
    import re

    from gym_fed.core.console import TextTable
    from gym_fed.serving.http.usage_log import sum_usage

    if month is not None and not re.fullmatch(r"\d{4}-(0[1-9]|1[0-2])", month):
        raise GymError(ErrorCode.USAGE, f"--month {month!r} is not a month", "write it like 2026-11")
    if as_csv and as_json:
        raise GymError(ErrorCode.USAGE, "--csv cannot be combined with --json", "choose one")
    report = sum_usage(file, month)
    rows = [one.to_dict() for one in report.sums]
    if as_json:
        print_json({"sums": rows, "unreadable": report.unreadable})
    elif as_csv:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_COLUMNS)
        writer.writerows([_cell(row[column]) for column in _COLUMNS] for row in rows)
        out.file.write(text.getvalue())
    else:
        table = TextTable("month", "key", "user", "requests", "prompt tokens", "answer tokens", "all tokens")
        for row in rows:
            shown = [f"{row[column]:,}" for column in _COLUMNS[3:]]
            table.add_row(row["month"], plain(row["key"], 64), plain(row["user"], 64) or "-", *shown)
        print_table(table)
    if report.unreadable:
        err.print(
            f"{counted(report.unreadable, 'line')} of {file} could not be read and are not counted",
            markup=False,
        )


def _cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(_FORMULA) else value
