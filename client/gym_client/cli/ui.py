"""The command `gym-client ui`: contribute from a page in a browser."""

from __future__ import annotations

from typing import Annotated

from gym_client.cli.options import HomeFolder, PassphraseFile, open_home
from gym_fed.core.addresses import host_port
from gym_fed.core.console import AsJsonLines, err, out, print_event
from gym_fed.core.help import PORT, OpenOption
from gym_fed.core.progress import spinner


def ui(
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    port: Annotated[int, PORT] = 7862,
    open_page: OpenOption = None,
    as_json: AsJsonLines = False,
) -> None:
    """Contribute from a page in your browser, on this machine only. Ctrl-C ends the page, not the contributing."""
    with spinner("loading the page"):
        from gym_client.web.app import open_ui

    folder = open_home(home, passphrase_file)
    server, jobs = open_ui(folder, host_port("127.0.0.1", port), passphrase_file)
    err.print("Ctrl-C ends the page; contributing continues")
    if as_json:
        print_event({"event": "ui", "url": server.url})
    else:
        out.print(server.url)
    if open_page or (open_page is None and out.is_terminal):
        import webbrowser

        webbrowser.open(server.url_for_browser())
    server.run()
    if any(job.status == "running" for job in jobs.list()):
        err.print("still contributing; `gym-client pause` makes it wait")
