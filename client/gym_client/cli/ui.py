"""The command `gym-client ui`: contribute from a page in a browser."""

from __future__ import annotations

from typing import Annotated

import typer

from gym_client.cli.options import HomeFolder, PassphraseFile, open_home
from gym_fed.core.addresses import host_port
from gym_fed.core.console import AsJsonLines, err, out, print_event
from gym_fed.core.errors import GymError
from gym_fed.core.help import PORT, OpenOption
from gym_fed.core.progress import spinner
from gym_fed.trust.identity.login import require_link

_UNUSED_SECONDS = 600.0
"""Seconds without an open page after which the server stops. Browsers also close pages while a machine sleeps."""


def ui(
    invite: Annotated[
        str | None, typer.Argument(metavar="[INVITE]", help="Invite to show on the page.", show_default=False)
    ] = None,
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    port: Annotated[int, PORT] = 7862,
    open_page: OpenOption = None,
    until_closed: Annotated[
        bool, typer.Option("--until-closed", help="Exit a few minutes after the page is closed.")
    ] = False,
    as_json: AsJsonLines = False,
) -> None:
    """Contribute from a page in your browser, on this machine only. Ctrl-C closes the page; contributing continues."""
    with spinner("loading the page"):
        from gym_client.web.app import open_ui

    link, problem = _link(invite or "", shows_problem=until_closed)
    folder = open_home(home, passphrase_file)
    server, jobs = open_ui(
        folder,
        host_port("127.0.0.1", port),
        passphrase_file,
        invite=link,
        link_problem=problem,
        unused_seconds=_UNUSED_SECONDS if until_closed else None,
    )
    err.print("Ctrl-C closes the page; contributing continues")
    if as_json:
        print_event({"event": "ui", "url": server.url})
    elif not until_closed:  # without a terminal, the token would be written to the desktop's log
        out.print(server.url)
    if open_page or (open_page is None and out.is_terminal):
        server.open_browser()
    server.run()
    if any(job.status == "running" for job in jobs.list()):
        err.print("still contributing; `gym-client pause` pauses it")


def _link(invite: str, shows_problem: bool) -> tuple[str, str]:
    """Return the invite to show on the page. If it is refused, return an empty invite and the reason.

    A page that was opened by a click has no terminal, so the page must show the problem itself.

    Raises:
        GymError: ``INVITE_INVALID`` unless ``shows_problem``.
    """
    try:
        return require_link(invite) if invite else "", ""
    except GymError as error:
        if not shows_problem:
            raise
        return (
            "",
            f"The link cannot be used: {error.message}. Ask for a new link, or paste the complete link below.",
        )
