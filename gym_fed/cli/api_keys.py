"""`gym api keys`: make, list and take away the keys of a server, also while it runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from gym_fed.console import AsJson, err, out, print_json, print_result, print_table

app = typer.Typer(help="Who may use a server, and which models of it.", no_args_is_help=True)

FileOption = Annotated[
    Path, typer.Option("--file", metavar="FILE", help="The server's api_keys; made where there is none.")
]
NameArgument = Annotated[str, typer.Argument(help="Of whoever gets the key.")]
DEFAULT_FILE = Path("api_keys.json")
_DAY_SECONDS = 24 * 60 * 60


@app.command()
def add(
    name: NameArgument,
    file: FileOption = DEFAULT_FILE,
    variant: Annotated[
        list[str] | None, typer.Option("--variant", metavar="NAME", help="May use this variant.")
    ] = None,
    owner: Annotated[
        list[str] | None,
        typer.Option("--owner", metavar="ID", help="May use all variants of this account or user id."),
    ] = None,
    all_variants: Annotated[bool, typer.Option("--all-variants", help="May use every variant.")] = False,
    base: Annotated[bool, typer.Option("--base/--no-base", help="May use the base itself.")] = True,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="May read /metrics, which tells of everybody's requests.")
    ] = False,
    expires_days: Annotated[
        float | None, typer.Option("--expires-days", min=0.0, help="From now; without it, never.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and show it, this once: the file has its hash alone."""
    from gym_fed.serving.api.keys import KeyFile

    expires_at = None if expires_days is None else int(time.time() + expires_days * _DAY_SECONDS)
    key = KeyFile(file).add(
        name,
        base=base,
        everything=all_variants,
        variants=tuple(variant or ()),
        owners=tuple(owner or ()),
        metrics=metrics,
        expires_at=expires_at,
    )
    if as_json:
        print_json({"name": name, "key": key, "file": str(file), "expires_at": expires_at})
        return
    err.print(f"the key of {name}, which is shown this once and kept nowhere:")
    out.print(key)


@app.command("list")
def list_(file: FileOption = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Show whose keys there are, and what each may use."""
    from rich.text import Text

    from gym_fed.serving.api.keys import KeyFile
    from gym_fed.tables import TextTable

    keys = KeyFile(file).keys()
    if as_json:
        print_json([key.model_dump(mode="json", exclude={"sha256"}) for key in keys])
        return
    table = TextTable("name", "base", "variants", "metrics", "made", "expires")
    for key in keys:
        allowed = ["all"] if key.everything else [*key.variants, *(f"those of {who}" for who in key.owners)]
        table.add_row(
            key.name,
            "yes" if key.base else "no",
            Text(", ".join(allowed) or "none"),  # however many they are
            "yes" if key.metrics else "no",
            _day(key.created_at),
            "never" if key.expires_at is None else _day(key.expires_at),
        )
    print_table(table)


@app.command()
def remove(name: NameArgument, file: FileOption = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Take a key away; a running server refuses it from its next request on, and ends no answer that is under way."""
    from gym_fed.serving.api.keys import KeyFile

    KeyFile(file).remove(name)
    print_result(as_json, {"removed": name, "file": str(file)}, f"the key of {name} is gone")


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
