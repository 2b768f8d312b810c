"""The workbench's web application: the routes of its screens, its events and its server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query

from gym_fed.serving.http.connections import NO_PROXIES
from gym_fed.serving.http.proxies import Proxies
from gym_fed.web.access import KEYS_NAME, WebKeys
from gym_fed.web.app import Changing, Face, Looking
from gym_fed.web.server import WebServer
from gym_fed.webui import data, evals, join, models, play, runs, train, tune
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
    face = Face("webui", title, screens, routes, workbench.feed)
    keys = WebKeys(workbench.runs / KEYS_NAME)
    add_key = "gym webui keys add NAME --role operator"
    return WebServer(face, listen, keys=keys, add_key=add_key, proxies=proxies)


def routers(workbench: Workbench) -> list[APIRouter]:
    """Create the routes of all screens and those below ``/jobs``."""
    screens = (data, evals, models, play, runs, train, tune, join)
    return [_job_routes(workbench), *(screen.routes(workbench) for screen in screens)]


def _job_routes(workbench: Workbench) -> APIRouter:
    """Create the routes below ``/jobs``."""
    router, jobs = APIRouter(), workbench.jobs

    @router.get("/jobs")
    def listed(visitor: Looking) -> dict[str, Any]:
        """List the newest jobs."""
        every = jobs.list()
        return {"jobs": [job.facts() for job in every], "total": len(every)}

    @router.get("/jobs/{id}")
    def one(id: str, visitor: Looking) -> dict[str, Any]:
        """Describe a job."""
        return jobs.get(id).facts()

    @router.get("/jobs/{id}/output")
    def output(
        id: str, visitor: Looking, offset: Annotated[int, Query(ge=-(2**40), le=2**40)] = 0
    ) -> dict[str, Any]:
        """Return a job's output from a byte offset."""
        return jobs.output(id, offset)

    @router.post("/jobs/{id}/stop")
    def stop(id: str, visitor: Changing) -> dict[str, Any]:
        """Interrupt a job; a second call terminates it, and a third kills it."""
        return jobs.stop(id).facts()

    return router
