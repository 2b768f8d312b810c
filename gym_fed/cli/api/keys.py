"""`gym api keys`: the API keys of a server, each with the models that it may use."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_fed.cli.completion import variants
from gym_fed.core.console import AsJson, err, out, print_json, print_result, print_table
from gym_fed.core.help import App, KeyName

if TYPE_CHECKING:
    from gym_fed.serving.http.keys import ApiKey

_DAY_SECONDS = 24 * 60 * 60

keys_app = App(help="Add, list and remove API keys, each valid for certain models.", no_args_is_help=True)

FileOption = Annotated[Path, typer.Option("--file", metavar="FILE", help="API key file; `add` creates it.")]
DEFAULT_FILE = Path("api_keys.json")


@keys_app.command()
def add(
    name: KeyName,
    file: FileOption = DEFAULT_FILE,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            "--variant", metavar="NAME", help="Allow this variant; repeatable.", autocompletion=variants
        ),
    ] = None,
    owner: Annotated[
        list[str] | None,
        typer.Option("--owner", metavar="ID", help="Allow all variants of this account or user id."),
    ] = None,
    all_variants: Annotated[bool, typer.Option("--all-variants", help="Allow every variant.")] = False,
    base: Annotated[bool, typer.Option("--base/--no-base", help="Allow the base itself.")] = True,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Allow /metrics, which covers all users' requests.")
    ] = False,
    manage_variants: Annotated[
        bool, typer.Option("--manage-variants", help="Allow adding and removing variants over HTTP.")
    ] = False,
    requests_per_minute: Annotated[
        int | None,
        typer.Option("--requests-per-minute", min=1, help="Request limit per minute; none by default."),
    ] = None,
    tokens_per_minute: Annotated[
        int | None,
        typer.Option("--tokens-per-minute", min=1, help="Token limit per minute; none by default."),
    ] = None,
    expires_days: Annotated[
        float | None,
        typer.Option("--expires-days", min=0.0, help="Days until the key expires; by default it does not."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Add a key and print it once; the file stores only its hash."""
    from gym_fed.serving.http.keys import KeyFile

    expires_at = None if expires_days is None else int(time.time() + expires_days * _DAY_SECONDS)
    key = KeyFile(file).add(
        name,
        base=base,
        everything=all_variants,
        variants=tuple(variant or ()),
        owners=tuple(owner or ()),
        metrics=metrics,
        manage_variants=manage_variants,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        expires_at=expires_at,
    )
    if as_json:
        print_json({"name": name, "key": key, "file": str(file), "expires_at": expires_at})
        return
    err.print(f"the key of {name}, shown only now and not stored:")
    out.print(key)


@keys_app.command("list")
def list_(file: FileOption = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """List the keys, their owners and permissions."""
    from rich.text import Text

    from gym_fed.core.console import TextTable
    from gym_fed.serving.http.keys import KeyFile

    keys = KeyFile(file).all()
    if as_json:
        print_json([key.model_dump(mode="json", exclude={"sha256"}) for key in keys])
        return
    table = TextTable("name", "base", "variants", "metrics", "manages", "per minute", "made", "expires")
    for key in keys:
        allowed = ["all"] if key.everything else [*key.variants, *(f"those of {who}" for who in key.owners)]
        table.add_row(
            key.name,
            "yes" if key.base else "no",
            Text(", ".join(allowed) or "none"),
            "yes" if key.metrics else "no",
            "yes" if key.manage_variants else "no",
            _limits(key),
            _day(key.created_at),
            "never" if key.expires_at is None else _day(key.expires_at),
        )
    print_table(table)


@keys_app.command()
def remove(name: KeyName, file: FileOption = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """Remove a key; a running server refuses new requests with it, and lets active answers finish."""
    from gym_fed.serving.http.keys import KeyFile

    KeyFile(file).remove(name)
    print_result(as_json, {"removed": name, "file": str(file)}, f"the key of {name} is removed")


def _limits(key: ApiKey) -> str:
    limits = ((key.requests_per_minute, "requests"), (key.tokens_per_minute, "tokens"))
    return ", ".join(f"{limit:,} {what}" for limit, what in limits if limit is not None) or "-"


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
