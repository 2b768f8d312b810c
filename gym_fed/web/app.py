"""The FastAPI application of a site (dashboard or workbench): pages and routes behind the same access checks.

A ``Face`` (the hub's dashboard or the workbench) provides routes and a folder of screens. Pages and static files
contain no data and are open to all; routes under ``/api`` and ``/events`` require a visitor. Errors are JSON:
``{"error": {"code", "message", "hint"}}``.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.middleware.gzip import GZipMiddleware
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.routing import Match, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.addresses import network_of
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.http.proxies import prefix_of, route_path
from gym_fed.version import __version__
from gym_fed.web.access import Access, Role, Visitor
from gym_fed.web.events import Feed

STATIC = Path(__file__).parent / "static"
JOINED = {
    "gym.css": ("text/css", ("vendor/uPlot.min.css", "gym.css")),
    "charts.js": ("text/javascript", ("vendor/uPlot.iife.min.js", "charts.js")),
}
"""Files assembled from parts, by their name below ``/static``: media type and parts. A part may import modules."""

EVENTS = "/events"
"""Path of the stream of events."""

MAX_BODY_BYTES = 4 * 2**20
"""Maximum size of an operator's request body in bytes."""
MAX_LOGIN_BYTES = 4096
"""Maximum size of other request bodies in bytes, which are parsed before a route checks the sender."""
POLICY = (
    "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Face:
    """The content served at one address.

    Attributes:
        name: Name of the site: ``hub`` or ``webui``.
        title: Displayed title, chosen by the coordinator and therefore untrusted.
        screens: Folder with ``index.html`` and the modules of its screens, served under ``/screens/``.
        routes: Routes below ``/api/v1``; those that make changes depend on ``changing``.
        feed: Feed that ``/events`` streams.
        root_router: Routes outside of ``/api/v1``, such as ``/metrics``.
        more_screens: Folders with modules of screens that other sites share.
    """

    name: str
    title: str
    screens: Path
    routes: APIRouter
    feed: Feed
    root_router: APIRouter = field(default_factory=APIRouter)
    more_screens: tuple[Path, ...] = ()


class _Login(StrictModel):
    key: str = Field(max_length=200)


def create_app(face: Face, access: Access) -> FastAPI:
    """Create the application."""
    app = FastAPI(
        title=f"gym-fed {face.name}", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.access = access

    @app.get("/api/v1/session")
    def session(request: Request) -> dict[str, Any]:
        """Return a description of the site and the visitor; operators also get the CSRF token."""
        sender = access.visitor(request)
        about = {"face": face.name, "title": face.title, "version": __version__}
        if sender is None:
            return {**about, "visitor": None}
        return {**about, "visitor": sender.name, "role": sender.role.name.lower(), "csrf": sender.csrf}

    def page_of(request: Request) -> Response:
        """Return the page with its session embedded, which saves one request before the first view."""
        text = (face.screens / "index.html").read_text(encoding="utf-8")
        for folder in ("static", "screens"):
            text = text.replace(f'"/{folder}/', f'"{prefix_of(request.scope)}/{folder}/')
        meta = f'<meta name="session" content="{escape(json.dumps(session(request)))}">'
        headers = {"Cache-Control": "no-store"}
        return HTMLResponse(text.replace("</head>", f"{meta}\n</head>", 1), headers=headers)

    @app.get("/login")
    def login_by_url(request: Request, token: str = "") -> Response:
        """Start a session with the token of the URL, and redirect to a URL without it.

        After a link from another site or a file, browsers send no strict cookie on a redirect; a page then redirects
        instead.
        """
        if not token:
            return page_of(request)
        home = f"{prefix_of(request.scope)}/"
        response: Response = RedirectResponse(home, 303)
        if request.headers.get("sec-fetch-site", "none") != "none":
            response = HTMLResponse(
                f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(home)}">',
                headers={"Cache-Control": "no-store"},
            )
        access.set_cookie(request, response, access.login(token))
        return response

    @app.post("/api/v1/login")
    def login(request: Request, given: _Login) -> Response:
        """Start a session with a key or the token."""
        response = JSONResponse({})
        access.set_cookie(request, response, access.login(given.key))
        return response

    @app.post("/api/v1/logout")
    def logout(request: Request, visitor: Changing) -> dict[str, Any]:
        """End the session."""
        access.logout(request)
        return {}

    @app.get(EVENTS)
    async def events(request: Request, visitor: Looking, after: str = "") -> Response:
        """Stream events. ``after`` is the last id of a page that opened a new stream without the standard header."""
        last = request.headers.get("last-event-id") or after
        return face.feed.response(last, caller_network(request), operator=visitor.role >= Role.OPERATOR)

    app.include_router(face.routes, prefix="/api/v1")
    app.include_router(face.root_router)
    app.include_router(joined_files())
    app.mount("/static", StaticFiles(directory=STATIC), "static")
    app.mount("/screens", _Screens(face.screens, face.more_screens), "screens")

    @app.get("/{path:path}")
    def page(request: Request, path: str) -> Response:
        """Return the page, which is the same for every screen; its script reads the path."""
        if path.startswith(("api/", "events", "static/", "screens/")):
            raise GymError(ErrorCode.NOT_FOUND, f"/{path} does not exist")
        return page_of(request)

    _handle_errors(app)
    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=5)
    app.add_middleware(_Guarded, access=access)
    return app


def caller_network(request: Request) -> str:
    """Return the network of a request's sender, for limits per address; see ``network_of``."""
    host = request.client.host if request.client else ""
    try:
        return network_of(host.partition("%")[0])
    except ValueError:  # a name in tests
        return host


def looking(request: Request) -> Visitor:
    """Require a visitor."""
    access: Access = request.app.state.access
    return access.require(request)


def operating(request: Request) -> Visitor:
    """Require an operator, for reading."""
    access: Access = request.app.state.access
    return access.require(request, Role.OPERATOR)


def measuring(request: Request) -> Visitor:
    """Require a visitor, or a monitoring program that sends the token or a key."""
    access: Access = request.app.state.access
    return access.bearer(request) or access.require(request)


def changing(request: Request) -> Visitor:
    """Require an operator and the CSRF token, for changes."""
    access: Access = request.app.state.access
    return access.require_change(request)


Looking = Annotated[Visitor, Depends(looking)]
Operating = Annotated[Visitor, Depends(operating)]
Measuring = Annotated[Visitor, Depends(measuring)]
Changing = Annotated[Visitor, Depends(changing)]


def _answer(error: GymError, status: int | None = None) -> JSONResponse:
    body = {"code": error.code.value, "message": error.message, "hint": error.hint}
    return JSONResponse({"error": body}, status or error.code.http_status)


def _handle_errors(app: FastAPI) -> None:
    @app.exception_handler(GymError)
    async def refused(request: Request, error: GymError) -> Response:
        if error.code is ErrorCode.INTERNAL:
            _log.error("%r failed", request.url.path, exc_info=error)
        return _answer(error)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        # drop "body", "path" or "query"
        place = ".".join(str(part) for part in first["loc"][1:]) or "request"
        return _answer(GymError(ErrorCode.USAGE, f"{place}: {first['msg']}"))

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        allowed = {"Allow": _allowed(app, request.scope)} if error.status_code == 405 else {}
        if allowed and request.method == "OPTIONS":
            return Response(status_code=204, headers=allowed)
        answer = _answer(
            GymError(ErrorCode.NOT_FOUND, f"{request.url.path}: {error.detail}"), error.status_code
        )
        answer.headers.update(allowed)
        return answer


def _allowed(app: FastAPI, scope: Scope) -> str:
    """Return the methods of a path for the header ``Allow``."""
    methods = {
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(
            route.matches({**scope, "method": method})[0] is Match.FULL
            for route in app.routes[:-1]  # not the page, which answers every path
            if not isinstance(route, Mount)
        )
    }
    if not methods:  # a file or a page
        methods = {"GET"}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set()) | {"OPTIONS"}))


class _Guarded:
    """ASGI middleware that checks host, origin and body size, sets response headers, and answers HEAD like GET."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app, self._access = app, access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        begun, path = False, route_path(scope)
        # the stream of events would never end
        is_head = scope["method"] == "HEAD" and path != EVENTS
        if is_head:
            scope = {**scope, "method": "GET"}

        async def sending(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = {name.encode(): value.encode() for name, value in HEADERS.items()}
                if path.startswith("/api/"):
                    headers[b"Cache-Control"] = b"no-store"
                elif path.startswith(("/static/", "/screens/")):
                    # Revalidate by ETag, since a newer release has other screens
                    headers[b"Cache-Control"] = b"no-cache"
                message["headers"] = [*message.get("headers", []), *headers.items()]
            elif is_head:
                message["body"] = b""
            await send(message)

        read, most = 0, MAX_LOGIN_BYTES

        async def receiving() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > most:
                raise HTTPException(413, f"more than {counted(most, 'byte')}")
            return message

        request = Request(scope)
        try:
            self._access.require_place(request)
            visitor = self._access.visitor(request)
            if visitor is not None and visitor.role >= Role.OPERATOR:
                most = MAX_BODY_BYTES
            declared = request.headers.get("content-length", "0")
            if not declared.isdecimal() or len(declared) > 12 or int(declared) > most:
                raise GymError(ErrorCode.TOO_LARGE, f"the request has more than {counted(most, 'byte')}")
        except GymError as error:
            await _answer(error)(scope, receive, sending)
            return
        try:
            await self._app(scope, receiving, sending)
        except Exception:  # noqa: BLE001 (the app's own handler would answer without the headers)
            _log.exception("%r failed", scope["path"])
            if not begun:
                defect = GymError(ErrorCode.INTERNAL, "the server failed", "see the traceback in its log")
                await _answer(defect)(scope, receive, sending)


class _Screens(StaticFiles):
    """The modules of several folders; the first folder that contains a name is used."""

    def __init__(self, folder: Path, others: tuple[Path, ...]) -> None:
        super().__init__(directory=folder)
        self.all_directories = [folder, *others]


def joined_files() -> APIRouter:
    """Create the routes of ``JOINED``, which must precede the mounted folder."""
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
