"""Static files that are always needed together, sent as one: a first view takes few requests."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

STATIC = Path(__file__).parent / "static"
JOINED = {
    "gym.css": ("text/css", ("vendor/uPlot.min.css", "gym.css")),
    "charts.js": ("text/javascript", ("vendor/uPlot.iife.min.js", "charts.js")),
}
"""By the name below ``/static``: its type, and its parts. A module's imports may stand anywhere at its top level."""


def joined_files() -> APIRouter:
    """The routes of ``JOINED``; to be added before the folder itself."""
    routes = APIRouter()
    for name, (kind, parts) in JOINED.items():
        body = b"\n".join((STATIC / part).read_bytes() for part in parts)
        routes.get(f"/static/{name}")(_sender(body, kind))
    return routes


def _sender(body: bytes, kind: str) -> Callable[[Request], Response]:
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"ETag": tag}

    def send(request: Request) -> Response:
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=kind, headers=headers)

    return send
