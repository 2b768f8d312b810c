"""The `gym-server certificate` commands, which show, request, install and create the hub's certificate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gym_fed.core.console import AsJson, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.help import App
from gym_server.cli.options import DEFAULT_FOLDER, Folder, opened

app = App(
    help="Show the hub's TLS certificate, or have an authority sign one for its key.", no_args_is_help=True
)

_NEXT_START = "a running hub uses it after a restart"


@app.command()
def show(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Show the certificate's issuer, key and expiry."""
    with opened(folder):
        from gym_server.certificate import describe

        facts = describe(folder)
    by = f"{facts['issuer']} for {facts['host']}" if facts["issuer"] else "the hub itself"
    print_result(
        as_json, facts, f"key {facts['fingerprint']}", f"signed by {by}, valid until {facts['valid_until']}"
    )


@app.command()
def request(
    host: Annotated[
        str | None, typer.Argument(help="Name of the hub's machine.", show_default="that of `advertise`")
    ] = None,
    folder: Folder = DEFAULT_FOLDER,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write.", show_default="printed"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a signing request (PKCS #10) for the hub's key, for an authority such as Let's Encrypt."""
    from gym_fed.config.schema.endpoint import Endpoint
    from gym_fed.core.files import write_atomically

    with opened(folder) as fed:
        from gym_server.certificate import request as made

        if host is None and fed.config.advertise is None:
            raise GymError(
                ErrorCode.USAGE,
                "no host name was given, and the config has no `advertise`",
                "gym-server certificate request HOST",
            )
        name = host or Endpoint.parse(str(fed.config.advertise))[0]
        pem = made(folder, name, fed.passphrase.get)
    if output is not None:
        write_atomically(output, pem)
    text = pem.decode().rstrip() if output is None else f"wrote a request for {name} to {output}"
    print_result(as_json, {"host": name, "request": pem.decode()}, text)


@app.command()
def add(
    chain: Annotated[
        Path, typer.Argument(help="PEM file, with the hub's certificate first.", show_default=False)
    ],
    folder: Folder = DEFAULT_FOLDER,
    as_json: AsJson = False,
) -> None:
    """Use an authority's certificate. It must be for the hub's key, by which contributors identify the hub."""
    with opened(folder) as fed:
        from gym_server.certificate import add as taken
        from gym_server.certificate import describe

        taken(folder, chain, fed.passphrase.get)
        facts = describe(folder)
    print_result(
        as_json,
        facts,
        f"{facts['issuer']} certifies {facts['host']} until {facts['valid_until']}; {_NEXT_START}",
    )


@app.command()
def create(folder: Folder = DEFAULT_FOLDER, as_json: AsJson = False) -> None:
    """Create a new self-signed certificate for the same key, which replaces the current one."""
    with opened(folder) as fed:
        from gym_server.certificate import create as made
        from gym_server.certificate import describe

        made(folder, fed.passphrase.get)
        facts = describe(folder)
    print_result(
        as_json, facts, f"self-signed certificate, valid until {facts['valid_until']}; {_NEXT_START}"
    )
