"""The `gym-server mirror` command, which serves a verified, read-only copy of another hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gym_fed.core.addresses import host_port
from gym_fed.core.console import AsJsonLines, out, print_event
from gym_fed.core.help import HOST, PORT


def mirror(
    hub: Annotated[str, typer.Argument(metavar="HUB", help="Address of the hub, HOST or HOST:PORT.")],
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the mirror; it is created.")
    ] = Path("mirror"),
    host: Annotated[str, HOST] = "127.0.0.1",
    port: Annotated[int, PORT] = 9450,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            metavar="FINGERPRINT", help="Fingerprint of the server's key, sha256:...", show_default=False
        ),
    ] = None,
    invite: Annotated[
        str | None,
        typer.Option(envvar="GYM_INVITE", metavar="INVITE", help="Invite, or its token.", show_default=False),
    ] = None,
    as_json: AsJsonLines = False,
) -> None:
    """Follow a hub, and serve its ledger, base, soups and public variants.

    The first start needs --fingerprint, which `gym-server run` prints, or --invite.
    """
    from gym_fed.core.logs import log_to_stderr
    from gym_server.cli.run import LOG_LEVELS
    from gym_server.mirror.serve import run_mirror

    log_to_stderr(LOG_LEVELS, "text")

    def on_listening(listening_port: int, own: str) -> None:
        if as_json:
            print_event({"event": "listening", "port": listening_port, "fingerprint": own})
            return
        address = host_port(host, listening_port)
        out.print(f"serving a mirror of {hub} at {address}; for the hub's gym-server.yaml:", markup=False)
        out.print(f"mirrors: [{{address: {address}, fingerprint: {own}}}]", markup=False, soft_wrap=True)

    run_mirror(folder, hub, host_port(host, port), fingerprint, invite, on_listening)
