"""The `gym-server init` command, which creates a hub."""

from __future__ import annotations

from typing import Annotated

import typer

from gym_fed.core.console import AsJson, print_columns, print_result
from gym_fed.core.progress import spinner
from gym_server.cli.options import DEFAULT_FOLDER, Folder


def init(
    folder: Folder = DEFAULT_FOLDER,
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="MODEL",
            help="gym-nano, a model folder, or a name on the Hub.",
            show_default="gym-nano",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the hub, shown to contributors.", show_default="a gym-fed community"
        ),
    ] = None,
    enrolment: Annotated[
        str | None,
        typer.Option(metavar="MODE", help="Who may join: open, invite or allow-list.", show_default="invite"),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Address at which contributors reach the hub.",
            show_default="127.0.0.1:9443",
        ),
    ] = None,
    heldout: Annotated[
        str | None,
        typer.Option(
            metavar="ROWS",
            help="Rows to evaluate every version on: a file, or task:NAME.",
            show_default="none",
        ),
    ] = None,
    root_data: Annotated[
        str | None,
        typer.Option(
            metavar="ROWS",
            help="A hundred other rows to judge unusually large updates on: a file, or task:NAME.",
            show_default="none",
        ),
    ] = None,
    num_rounds: Annotated[
        int | None, typer.Option(help="Number of versions that the run creates.", show_default="10")
    ] = None,
    min_contributors: Annotated[
        int | None, typer.Option(help="Number of updates that a round waits for (quorum).", show_default="3")
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            metavar="E",
            help="Differential privacy budget of the whole run; noise is added to the soups.",
            show_default="none",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not prompt; use the defaults.")] = False,
    encrypt_keys: Annotated[
        bool,
        typer.Option(
            "--encrypt-keys",
            help="Encrypt keys with GYM_SERVER_PASSPHRASE, or with a passphrase typed at the prompt.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Create keys, certificate, database and a commented config in a new folder.

    On a terminal, it prompts for each value unless any of them is given.
    """
    with spinner("loading the hub's packages"):
        from gym_fed.trust.identity.passphrase import PassphraseSource
        from gym_server.cli.questions import choose
        from gym_server.cli.setup import init_hub, notes_after_init, require_new, steps_after_init
        from gym_server.federation import PASSPHRASE_VARIABLE, read_config

    require_new(folder)
    flags = {
        "base_model": base_model,
        "name": name,
        "enrolment": enrolment,
        "address": address,
        "heldout": heldout,
        "root_data": root_data,
        "num_rounds": num_rounds,
        "min_contributors": min_contributors,
        "epsilon": epsilon,
    }
    choices = choose(flags, may_ask=not yes and not as_json)
    source = PassphraseSource(PASSPHRASE_VARIABLE)
    secret = (lambda: source.create(f"the keys of {folder}")) if encrypt_keys else None
    server, fingerprint = init_hub(folder, choices, secret)
    config = read_config(folder)
    print_result(
        as_json,
        {"dir": str(folder), "server": server, "fingerprint": fingerprint},
        f"A hub in {folder}: id {server}, TLS key {fingerprint}",
        lambda: print_columns(steps_after_init(folder, config, fingerprint)),
        note="\n".join(f"note: {note}" for note in notes_after_init(config)),
    )
