"""`gym data catalogue`: the data sets that `data: [{name: ...}]` knows, with licence, size, columns and place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.core.console import AsJson, err, out, print_columns, print_json, print_table

if TYPE_CHECKING:
    from gym_fed.config.train.catalogue import CatalogueEntry

_UNSTATED = "not stated"
_ALWAYS = ("split", "licence", "rows", "bytes")
_WIDE = 150
"""Columns of a terminal in which the format and the place fit, too."""


def list_catalogue(
    name: Annotated[str | None, typer.Argument(help="Data set to show; by default all are listed.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the data sets of the hub that have a name here, or show one with its columns, bytes and place.

    Bytes are those of the split unpacked; what is fetched is smaller.
    """
    from gym_fed.config.train.catalogue import catalogue, catalogue_entry

    if name is not None:
        entry = catalogue_entry(name)
        if as_json:
            print_json(_facts(name, entry))
        else:
            facts = {key: value for key, value in _facts(name, entry).items() if value or key in _ALWAYS}
            print_columns([(key, _text(value)) for key, value in facts.items()], indent="")
            out.print(f"in a config: data: [{{name: {name}}}]")
        return
    entries = catalogue()
    if as_json:
        print_json([_facts(name, entry) for name, entry in entries.items()])
        return
    heading = ("name", "format", "rows", "bytes", "licence", "place", "what it is")
    lines = [
        (name, e.format, _number(e.rows), _number(e.bytes), e.licence or _UNSTATED, e.place, e.about)
        for name, e in entries.items()
    ]
    if out.is_terminal:
        _print_fitted(heading, lines)
    else:
        print_columns([heading, *lines], right=(2, 3), indent="")


def _print_fitted(heading: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> None:
    """The columns for which the terminal has room; what a set is wraps within the last."""
    from rich.table import Column

    from gym_fed.core.console import TextTable

    shown = (0, 1, 2, 4, 5, 6) if out.width >= _WIDE else (0, 2, 4, 6)
    columns = [
        Column(heading[i], no_wrap=heading[i] != "what it is", justify="right" if i == 2 else "left")
        for i in shown
    ]
    table = TextTable(*columns, box=None, pad_edge=False)
    for line in lines:
        table.add_row(*(line[i] for i in shown))
    print_table(table)
    err.print("all that is known of one: gym data catalogue NAME; of all: gym data catalogue --json")


def _facts(name: str, entry: CatalogueEntry) -> dict[str, Any]:
    return {
        "name": name,
        "about": entry.about,
        "place": entry.place,
        "subset": ", ".join(entry.subsets) or entry.subset,
        "split": entry.split,
        "format": entry.format,
        "columns": entry.read_columns,
        "licence": entry.licence,
        "rows": entry.rows,
        "bytes": entry.bytes,
        "pictures": entry.pictures,
        "also": entry.also,
    }


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(ours if ours == theirs else f"{ours}: {theirs}" for ours, theirs in value.items())
    if isinstance(value, list):
        return ", ".join(value)
    return _number(value) if isinstance(value, int) else value or _UNSTATED


def _number(value: int | None) -> str:
    return _UNSTATED if value is None else f"{value:,}"
