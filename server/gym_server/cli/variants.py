"""`gym-server variants`: list the variants of contributors, remove one, allow it again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_fed.core.console import AsJson, print_result, print_table
from gym_fed.core.help import App
from gym_fed.core.text import plain
from gym_server.cli.options import DEFAULT_FOLDER, Folder, opened

if TYPE_CHECKING:
    from gym_fed.core.console import TextTable

app = App(help="List, remove and allow again the variants of contributors on the hub.", no_args_is_help=True)


@app.command("list")
def list_variants(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """List every variant: owner, revision, model, size, and who may read it."""
    with opened(folder) as fed:
        variants = variants_of(fed)
    print_result(as_json, variants, lambda: print_table(variants_table(variants)))


def variants_table(variants: list[dict[str, Any]]) -> TextTable:
    """Return the variants of ``variants_of`` as a table."""
    from gym_fed.core.console import TextTable

    table = TextTable("owner", "variant", "revision", "of", "bytes", "read by", "key", box=None)
    for variant in variants:
        public, others = "*" in variant["readers"], len(variant["readers"])
        who = "everyone" if public else f"{others} others" if others else "its owner"
        row = (variant["owner"], variant["variant"], str(variant["revision"]), variant["base"])
        size = f"{variant['size_bytes']:,}"
        table.add_row(*row, size, who, variant["key_status"])
    return table


@app.command()
def remove(
    owner: Annotated[str, typer.Argument(help="Id of the account.", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the variant.", show_default=False)],
    reason: Annotated[str, typer.Option(help="Reason, written to the ledger.")],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Remove a variant: nobody reads it, and its owner cannot push it again. The hub may be running."""
    with opened(folder) as fed:
        receipt = fed.variants.remove(owner, name, "coordinator", reason)
    print_result(as_json, receipt, plain(f"variant {name} of {owner} is removed, and the ledger says why"))


@app.command()
def allow(
    owner: Annotated[str, typer.Argument(help="Id of the account.", show_default=False)],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the variant.", show_default=False)],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Allow an owner to push again what was removed under this name."""
    with opened(folder) as fed:
        fed.variants.allow(owner, name)
    print_result(
        as_json,
        {"owner": owner, "variant": name, "allowed": True},
        plain(f"{owner} may put variant {name} again"),
    )


def variants_of(fed: Any) -> list[dict[str, Any]]:
    """Return the variants, sorted by owner and name."""
    rows: list[dict[str, Any]] = []
    page = ""
    while True:
        variants, page = fed.variants.page(None, page)
        rows += [
            {
                **variant.signed.manifest.model_dump(mode="json"),
                "base": variant.base,
                "key_status": variant.key_status,
                "ledger_sequence": variant.ledger_sequence,
                "put_at": variant.put_at,
                "readers": list(variant.readers),
            }
            for variant in variants
        ]
        if not page:
            return rows
