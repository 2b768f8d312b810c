"""The workbench's face: its screens' routes, its feed, and the address it is served at."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter

from gym_fed.web.app import Face
from gym_fed.web.keys import KEYS_NAME, WebKeys
from gym_fed.web.server import WebServer
from gym_fed.webui import data, evals, job_routes, join, models, play, runs, train, tune
from gym_fed.webui.workbench import Workbench

SCREENS = (data, evals, job_routes, models, play, runs, train, tune, join)
"""Modules with ``routes(workbench)``; each is one part of the API."""


def open_webui(workbench: Workbench, listen: str, title: str) -> WebServer:
    """The server of a workbench, with its address taken.

    Raises:
        GymError: ``ADDRESS_IN_USE``, ``USAGE``.
    """
    routes = APIRouter()
    for screen in SCREENS:
        routes.include_router(screen.routes(workbench))
    face = Face("webui", title, Path(__file__).parent / "screens", routes, workbench.feed)
    keys = WebKeys(workbench.runs / KEYS_NAME)
    return WebServer(face, listen, keys=keys, add_key="gym webui keys add NAME --role operator")
