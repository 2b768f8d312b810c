"""`gym data catalogue`: the data sets that `data: [{name: ...}]` knows, with licence, size, columns and place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.console import AsJson, out, print_columns, print_json

if TYPE_CHECKING:
    from gym_fed.data.catalogue import CatalogueEntry

_UNSTATED = "not stated"
_ALWAYS = ("split", "licence", "rows", "bytes")


def list_catalogue(
    name: Annotated[str | None, typer.Argument(help="One data set, with all that is known of it.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the data sets of the hub that have a name here: licence, rows, bytes and place."""
    from gym_fed.data.catalogue import catalogue, catalogue_entry

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
    print_columns([heading, *lines], right=(2, 3), indent="")


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
