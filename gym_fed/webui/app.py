"""The workbench's web application: the routes of its screens, its events and its server."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from gym_client.web import contribute
from gym_client.web.app import SCREENS_FOLDER as CLIENT_SCREENS

from gym_fed.serving.http.connections import NO_PROXIES
from gym_fed.serving.http.proxies import Proxies
from gym_fed.web.access import KEYS_NAME, WebKeys
from gym_fed.web.app import Face
from gym_fed.web.jobs import job_routes
from gym_fed.web.server import WebServer
from gym_fed.webui import chats, data, evals, models, play, runs, train, tune
from gym_fed.webui.workbench import Workbench


def open_webui(workbench: Workbench, listen: str, title: str, proxies: Proxies = NO_PROXIES) -> WebServer:
    """Create the server of a workbench and bind its address.

    Raises:
        GymError: ``ADDRESS_IN_USE``, ``USAGE``.
    """
    screens = Path(__file__).parent / "screens"
    routes = APIRouter()
    for router in routers(workbench):
        routes.include_router(router)
    face = Face("webui", title, screens, routes, workbench.feed, more_screens=(CLIENT_SCREENS,))
    keys = WebKeys(workbench.runs / KEYS_NAME)
    add_key = "gym webui keys add NAME --role operator"
    return WebServer(face, listen, keys=keys, add_key=add_key, proxies=proxies)


def routers(workbench: Workbench) -> list[APIRouter]:
    """Create the routes of all screens and those below ``/jobs``."""
    screens = (chats, data, evals, models, play, runs, train, tune)

    def files() -> list[str]:
        return [file["name"] for file in data.data_files(workbench)["files"]]

    contributing = contribute.routes(contribute.Workplace(workbench.jobs, workbench.folder, files))
    return [job_routes(workbench.jobs), contributing, *(screen.routes(workbench) for screen in screens)]
