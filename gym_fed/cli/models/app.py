"""`gym models`: models of the Hub and of registries: fetch, publish, list, show, verify, tag."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from gym_fed.cli.models.needed import say_asking
from gym_fed.cli.models.push import push
from gym_fed.cli.models.registries import (
    AsIsOption,
    BaseOption,
    RegistryOption,
    SignerOption,
    YesOption,
    of_registry,
    pull_from_registry,
    registered,
    show,
    tag,
    verify,
)
from gym_fed.core.console import AsJson, err, print_json, print_result, print_table
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App

app = App(
    help="Fetch models of the Hugging Face Hub and of registries, publish your own, and list those on this machine.",
    no_args_is_help=True,
)


@app.command()
def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="Model of a registry (NAME, NAME@VERSION, NAME:TAG) or of the Hub (Qwen/Qwen3-0.6B).",
        ),
    ],
    registry: RegistryOption = None,
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="FOLDER", help="New folder for a registry's model."),
    ] = None,
    hub: Annotated[
        bool, typer.Option("--hub", help="Pull from the Hub, even if the registry has the name.")
    ] = False,
    signer: SignerOption = None,
    base: BaseOption = None,
    as_is: AsIsOption = False,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a model; what is here already is not fetched again. Ctrl-C keeps what came.

    A name that the registry has is the registry's, and every other one the Hub's.
    """
    if hub and (registry is not None or "@" in name):
        raise GymError(
            ErrorCode.USAGE, "--hub does not go with --registry or a version", "leave one of them out"
        )
    if not hub and of_registry(name, registry):
        pull_from_registry(name, registry, output, signer, base, as_is=as_is, yes=yes, as_json=as_json)
        return
    _refuse_for_the_hub({"--output": output, "--signer": signer, "--base": base, "--as-is": as_is or None})
    from gym_fed.base.downloads import pull_model
    from gym_fed.base.downloads.ensure import consent, progress

    say_asking(name)
    with progress() as report:
        offer, folder = pull_model(name, consent=consent(yes), report=report)
    print_result(
        as_json,
        {
            "name": name,
            "from": "hub",
            "commit": offer.commit,
            "folder": str(folder),
            "bytes": offer.total_bytes,
            "fetched_bytes": offer.missing_bytes,
            "licence": offer.licence,
        },
        f"{name} is here: {folder}",
        note=f"commit {offer.commit[:12]}; use it as model: {name}",
    )


app.command()(push)


@app.command("list")
def list_(registry: RegistryOption = None, as_json: AsJson = False) -> None:
    """List the models on this machine: gym-nano, those in the Hugging Face cache, imported ones, the registry's."""
    from gym_fed.base.downloads.local import local_models
    from gym_fed.core.console import TextTable
    from gym_fed.core.text import readable_bytes

    listed = registered(registry) if registry is not None else [*local_models(), *registered(None)]
    if as_json:
        print_json(listed)
        return
    table = TextTable("name", "where", "bytes", "version", "whole")
    for row in listed:
        version = str(row["version"]) if row["version"] else (row["commit"] or "")[:12]
        whole = row["problem"] or ("yes" if row["whole"] else "no")
        table.add_row(row["name"], row["where"], readable_bytes(row["bytes"]), version, whole)
    print_table(table)
    if not all(row["whole"] or row["where"] == "registry" for row in listed):
        err.print("those that are not whole go on with: gym models pull NAME", style="dim")


app.command()(show)
app.command()(verify)
app.command()(tag)


def _refuse_for_the_hub(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value is not None:
            raise GymError(
                ErrorCode.USAGE,
                f"{name} is for models of a registry",
                "name the registry with --registry, or leave the option out",
            )
