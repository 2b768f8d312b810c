"""Every route of both faces checks who sent a request, and what changes something is for operators' pages alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from gym_server.web import dashboard, health

from gym_fed.web.app import changing, looking, measuring, operating
from gym_fed.webui import app as webui
from gym_fed.webui.workbench import open_workbench

ASKING = "/model/newest/ask"
"""Changes nothing: viewers may ask where the hub allows it, a few times a minute; otherwise its own code checks."""


def asked(dependant: Dependant) -> Iterator[Any]:
    for inner in dependant.dependencies:
        yield inner.call
        yield from asked(inner)


def test_every_route_checks_its_visitor_and_every_change_for_an_operators_page(tmp_path: Path) -> None:
    workbench, hub, view = open_workbench(tmp_path, tmp_path / "runs"), MagicMock(), MagicMock()
    routers = webui.routers(workbench) + dashboard.routers(hub, view)
    found = [
        route
        for router in (*routers, health.beside(view, hub.traffic, hub.contributor_clocks))
        for route in router.routes
    ]
    assert len(found) > 60
    for route in found:
        assert isinstance(route, APIRoute)
        calls = set(asked(route.dependant))
        is_read = route.methods == {"GET"} or route.path == ASKING
        assert calls & ({looking, operating, measuring} if is_read else {changing}), route.path
        assert route.endpoint.__doc__, f"{route.path} lacks a docstring"
