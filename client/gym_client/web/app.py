"""The application of `gym-client ui`: the contributor's web pages and their server, on loopback only."""

from __future__ import annotations

import os
from pathlib import Path

from fastapi import APIRouter

from gym_client.identity.home import Home
from gym_client.web.contribute import Workplace, routes
from gym_client.web.links import link_routes
from gym_client.web.uninstall import uninstall_routes
from gym_fed.core.addresses import is_loopback
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.data.paging import is_data_file
from gym_fed.web.access import KEYS_NAME, WebKeys
from gym_fed.web.app import Face
from gym_fed.web.events import Feed, PageEvent
from gym_fed.web.jobs import Jobs, job_routes
from gym_fed.web.server import WebServer
from gym_fed.web.uploads import Uploads, add_upload_routes

SCREENS_FOLDER = Path(__file__).parent / "screens"
"""Folder of the pages' scripts, which the workbench also serves."""
_JOBS, _DATA = "jobs", "data"
"""Folders in the home: for the processes that the page started, and for the files that were dropped on it."""


def open_ui(
    home: Home,
    listen: str,
    passphrase_file: Path | None = None,
    *,
    invite: str = "",
    link_problem: str = "",
    unused_seconds: float | None = None,
) -> tuple[WebServer, Jobs]:
    """Create the server of a home's page and bind its address. Return it with the page's jobs.

    Args:
        home: The contributor's home.
        listen: Loopback address as ``host:port``; port 0 for a free port.
        passphrase_file: A file with the key's passphrase, for the commands that the page starts.
        invite: An invite that the page displays.
        link_problem: Why the link that opened the page is not a valid invite; shown on the page.
        unused_seconds: Seconds without an open page after which the server stops; None for never.

    Raises:
        GymError: ``USAGE`` for an address that other machines can reach; ``ADDRESS_IN_USE``.
    """
    if not is_loopback(f"//{listen}"):
        raise GymError(ErrorCode.USAGE, f"{listen} is not a loopback address", "use 127.0.0.1:PORT")
    jobs = Jobs(home.folder / _JOBS, home.folder)
    options = [f"--home={home.folder}"]
    if passphrase_file is not None:
        options.append(f"--passphrase-file={passphrase_file.expanduser().absolute()}")
    data = home.folder / _DATA

    def dropped() -> list[str]:
        """Return the files that were dropped on the page, newest first."""
        files = [file for file in data.iterdir() if is_data_file(file)] if data.is_dir() else []
        newest = sorted(files, key=os.path.getmtime, reverse=True)
        return [f"{_DATA}/{file.name}" for file in newest]

    place = Workplace(jobs, home.folder, dropped, home.folder, tuple(options), True, invite, link_problem)
    router = APIRouter()
    router.include_router(routes(place))
    router.include_router(job_routes(jobs))
    add_upload_routes(router, Uploads(lambda: data, lambda file: f"{_DATA}/{file.name}"))
    router.include_router(link_routes(home, passphrase_file))
    router.include_router(uninstall_routes(place, lambda: server.end()))
    feed = Feed(lambda last: (PageEvent("begin", {}),))
    face = Face("client", "gym-fed", SCREENS_FOLDER, router, feed)
    server = WebServer(
        face, listen, keys=WebKeys(home.folder / KEYS_NAME), add_key="", unused_seconds=unused_seconds
    )
    return server, jobs
