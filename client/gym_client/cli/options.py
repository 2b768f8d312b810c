"""Options shared by commands that use a contributor's home."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from gym_client.identity.home import Home

HomeFolder = Annotated[
    Path | None,
    typer.Option(
        "--home",
        metavar="FOLDER",
        envvar="GYM_HOME",
        help="Folder of your key, accounts, receipts and caches.",
        show_default="~/.gym-fed",
    ),
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A file whose first line is the key's passphrase.",
        show_default="$GYM_PASSPHRASE, or prompted",
    ),
]
Server = Annotated[
    str | None,
    typer.Option(
        "--server", metavar="HOST", help="host or host:port of the hub.", show_default="the one joined last"
    ),
]
Insecure = Annotated[bool, typer.Option("--insecure", help="Use plain text; for loopback addresses only.")]


def open_home(folder: Path | None, passphrase_file: Path | None) -> Home:
    """Open the home with the given source of its passphrase."""
    from gym_client.identity.home import Home
    from gym_client.identity.keystore import passphrases

    home = Home.open(folder)
    if passphrase_file is not None:
        passphrases(home.folder).file = passphrase_file
    return home
