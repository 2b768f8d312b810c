"""The Starlette application: routes, permissions, and errors in OpenAI's form.

``/health`` and ``/ready`` are open to all, for process monitors. Everything else needs a key if keys are configured;
``/metrics`` needs one with that permission.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http.admitted import Admitted, ClientGone, EventStream, RequestTimeout
from gym_fed.serving.http.gateway import Gateway
from gym_fed.serving.http.metrics import Metrics
from gym_fed.serving.http.proxies import route_path
from gym_fed.serving.http.rate_limits import LIMIT_HEADERS, RateLimited
from gym_fed.serving.openai.answers import StreamChunk
from gym_fed.serving.openai.fields import unsupported
from gym_fed.serving.openai.pending import Pending, PendingVectors
from gym_fed.serving.openai.refusals import RequestError, error_body
from gym_fed.serving.openai.responses import RESPONSES, input_items, page_of
from gym_fed.serving.openai.service import EMBEDDINGS, STORED, URLS
from gym_fed.serving.openai.tokenizing import DETOKENIZE, INPUT_TOKENS, LOAD, TOKENIZE, UNLOAD, Adapters

GONE_STATUS = 499
"""Status in metrics of a request whose client has disconnected; it is never sent."""

_log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(gateway: Gateway) -> Starlette:
    """Create the application of a gateway, whose model may be loaded later."""
    app = Starlette()
    metrics = Metrics(gateway)
    app.add_middleware(_Measured, gateway=gateway, metrics=metrics)

    @_route(app, "GET", "/health")
    async def health(request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    @_route(app, "GET", "/ready")
    async def ready(request: Request) -> Response:
        gateway.require_ready()
        return JSONResponse({"status": "ready"})

    @_route(app, "GET", "/metrics")
    async def prometheus(request: Request) -> Response:
        if not gateway.authenticator.caller(request.headers).metrics:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                "this key may not read the metrics, which cover everybody's requests",
                "create one that may: gym api keys add NAME --metrics --no-base",
            )
        text, kind = await run_in_threadpool(metrics.text)
        return Response(text, media_type=kind)

    @_route(app, "GET", "/v1/models")
    async def models(request: Request) -> Response:
        caller = gateway.authenticator.caller(request.headers)
        catalogue = gateway.open().service.catalogue

        def data() -> list[dict[str, Any]]:
            return [model.to_dict() for model in catalogue.list(caller)]

        return JSONResponse({"object": "list", "data": await run_in_threadpool(data)})

    @_route(app, "GET", "/v1/models/{name:path}")
    async def model(request: Request) -> Response:
        caller = gateway.authenticator.caller(request.headers)
        catalogue = gateway.open().service.catalogue
        listed = await run_in_threadpool(catalogue.resolve, request.path_params["name"], caller)
        return JSONResponse(listed.to_dict())

    for url in URLS:
        _route(app, "POST", url)(partial(_answer, gateway, url))
    for url in STORED:
        _serve_stored(app, gateway, url)
    _serve_input_items(app, gateway)
    for url in (TOKENIZE, DETOKENIZE, INPUT_TOKENS):
        _route(app, "POST", url)(partial(_tokens, gateway, url))
    for url in (LOAD, UNLOAD):
        _route(app, "POST", url)(partial(_manage, gateway, url))
    _handle_errors(app, gateway)
    return app


def with_cors(app: ASGIApp, origins: Iterable[str]) -> ASGIApp:
    """Allow web pages of these origins to call the application from a browser, each with its own key.

    The middleware surrounds the whole application, so that pages can also read errors.
    """
    allowed = list(origins)
    if not allowed:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),  # OpenAI's client sends about ten x-stainless headers
        allow_private_network=True,
        expose_headers=("Retry-After", *LIMIT_HEADERS),
    )


def _route(app: Starlette, method: str, path: str) -> Callable[[Endpoint], Endpoint]:
    def add(endpoint: Endpoint) -> Endpoint:
        app.add_route(path, endpoint, methods=[method])
        return endpoint

    return add


def _serve_stored(app: Starlette, gateway: Gateway, url: str) -> None:
    """Add the routes that read and delete a caller's stored answers."""

    @_route(app, "GET", f"{url}/{{answer_id}}")
    async def stored(request: Request) -> Response:
        admitted = Admitted(gateway, request)
        _refuse_query(request)
        answer_id = request.path_params["answer_id"]
        answer = admitted.serving.service.stored_answer(url, answer_id, admitted.caller)
        return Response(answer.body, media_type="application/json", headers=admitted.shares)

    @_route(app, "DELETE", f"{url}/{{answer_id}}")
    async def delete_stored(request: Request) -> Response:
        admitted = Admitted(gateway, request)
        answer_id = request.path_params["answer_id"]
        answer = admitted.serving.service.delete_stored(url, answer_id, admitted.caller)
        return JSONResponse(answer, headers=admitted.shares)


def _serve_input_items(app: Starlette, gateway: Gateway) -> None:
    """Add the route that lists the input items of a stored response."""

    @_route(app, "GET", f"{RESPONSES}/{{answer_id}}/input_items")
    async def items(request: Request) -> Response:
        admitted = Admitted(gateway, request)
        answer_id = request.path_params["answer_id"]
        stored = admitted.serving.service.stored_answer(RESPONSES, answer_id, admitted.caller)

        def page() -> Response:
            page_body = page_of(input_items(answer_id, stored.conversation()), request.query_params)
            return JSONResponse(page_body, headers=admitted.shares)

        async with gateway.parser_slot(admitted.caller):
            return await run_in_threadpool(page)


def _refuse_query(request: Request) -> None:
    """Refuse query parameters that would stream or extend a stored answer."""
    for name, value in request.query_params.items():
        if (name, value) != ("stream", "false"):
            raise unsupported(name[:80])


async def _tokens(gateway: Gateway, url: str, request: Request) -> Response:
    admitted = Admitted(gateway, request)
    service, caller = admitted.serving.service, admitted.caller

    def counted(body: Any) -> dict[str, Any]:
        if url == INPUT_TOKENS:
            return service.input_tokens(body, caller)
        return service.tokenizing.answer(url, body, caller)

    answer = await admitted.parsed(await admitted.body(), counted)
    return JSONResponse(answer, headers=admitted.shares)


async def _manage(gateway: Gateway, url: str, request: Request) -> Response:
    admitted = Admitted(gateway, request)
    serving = admitted.serving
    adapters = Adapters(serving.store, serving.config.adapters_folder, serving.service.catalogue)
    message = await admitted.parsed(
        await admitted.body(), lambda body: adapters.answer(url, body, admitted.caller)
    )
    return PlainTextResponse(message, headers=admitted.shares)


async def _answer(gateway: Gateway, url: str, request: Request) -> Response:
    admitted = Admitted(gateway, request)
    service, caller = admitted.serving.service, admitted.caller

    def begin(body: Any) -> tuple[Pending | PendingVectors, bool]:
        if url == EMBEDDINGS:
            return service.begin_vectors(body, caller), False
        return service.begin(url, body, caller), bool(body.get("stream"))

    def given_up(answer: tuple[Pending | PendingVectors, bool]) -> None:
        answer[0].end()
        gateway.limits.spend(caller, answer[0].used_tokens)

    data = await admitted.body()
    timeout = RequestTimeout(request.receive, gateway.request_timeout_seconds, gateway.stopped)
    pending, streams = await admitted.parsed(data, begin, given_up=given_up)
    del data

    def end() -> None:
        given_up((pending, streams))

    if isinstance(pending, Pending) and streams:
        response = await _stream(pending, timeout, gateway, end)
        response.headers.update(admitted.shares)
        return response
    try:
        answer = await timeout.wait(pending.arun())
    finally:
        end()
    return await run_in_threadpool(JSONResponse, answer, headers=admitted.shares)


async def _stream(
    pending: Pending, timeout: RequestTimeout, gateway: Gateway, end: Callable[[], None]
) -> Response:
    """Start a stream with its first chunk, so that an earlier failure has its own HTTP status."""
    chunks = pending.achunks()

    async def next_chunk() -> dict[str, Any]:
        return await anext(chunks)

    def failure(error: GymError) -> StreamChunk:
        return pending.failure(gateway.errors.body(error))

    try:
        first = await timeout.wait(next_chunk())
    except BaseException:
        end()
        raise
    return EventStream(first, chunks, timeout, failure, end, with_done=pending.ends_with_done)


def _handle_errors(app: Starlette, gateway: Gateway) -> None:
    """Return every error in OpenAI's form."""

    def response_of(error: GymError) -> JSONResponse:
        headers = dict(error.headers) if isinstance(error, RateLimited) else {}
        if (seconds := gateway.retry_after(error)) is not None:
            headers["Retry-After"] = str(seconds)
        if error.code is ErrorCode.UNAUTHENTICATED:
            headers["WWW-Authenticate"] = "Bearer"
        return JSONResponse(gateway.errors.body(error), error.code.http_status, headers)

    async def refused(request: Request, error: GymError) -> Response:
        if error.code.http_status == ErrorCode.INTERNAL.http_status:
            _log.error("%s failed", request.url.path, exc_info=error)
        return response_of(error)

    async def gone(request: Request, error: ClientGone) -> Response:
        return Response(status_code=GONE_STATUS)

    def known() -> str:
        """List every route, such as ``GET /v1/models``."""
        routes = (route for route in app.routes if isinstance(route, Route))
        described = [
            f"{method} {route.path.replace(':path', '')}"
            for route in routes
            for method in sorted((route.methods or set()) - {"HEAD"})
        ]
        return ", ".join(sorted(described, key=lambda route: route.split()[::-1]))

    async def no_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {str(error.detail).lower()}"
        if error.status_code == 405:
            methods = _methods(app, request.scope)
            headers = {"Allow": ", ".join(sorted(methods | {"OPTIONS"}))}
            if request.method == "OPTIONS":
                return Response(status_code=204, headers=headers)
            hint = f"this URL accepts {', '.join(sorted(methods - {'HEAD'}))}"
            refused = RequestError(message, name="method_not_allowed", hint=hint)
            return JSONResponse(error_body(refused), 405, headers)
        refused = RequestError(message, code=ErrorCode.NOT_FOUND, hint=f"there are {known()}")
        return JSONResponse(error_body(refused), error.status_code, error.headers)

    async def defect(request: Request, error: Exception) -> Response:
        answer = response_of(GymError(ErrorCode.INTERNAL, "the server failed", "its log has the traceback"))
        answer.headers["Connection"] = "close"  # Starlette raises the error again, and uvicorn then closes
        return answer

    handlers: dict[type[Exception], Any] = {
        GymError: refused,
        ClientGone: gone,
        HTTPException: no_route,
        Exception: defect,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _methods(app: Starlette, scope: Scope) -> set[str]:
    """Return the methods of all routes with this path."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    return set().union(
        *(route.methods or () for route in routes if route.matches(scope)[0] is not Match.NONE)
    )


class _Measured:
    """ASGI middleware that measures requests, and counts the active ones for answers."""

    def __init__(self, app: ASGIApp, gateway: Gateway, metrics: Metrics) -> None:
        self._app = app
        self._gateway = gateway
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, ended, path = GONE_STATUS, False, route_path(scope)

        async def sending(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        began = time.monotonic()
        try:
            if scope["method"] == "POST" and path in URLS:
                with self._gateway.counting():
                    await self._app(scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        except Exception:
            status, ended = ErrorCode.INTERNAL.http_status, True
            raise
        finally:
            self._metrics.observe(path, status if ended else GONE_STATUS, time.monotonic() - began)
