"""The Starlette application: routes, authorization, a limit on a body's size, and every error in OpenAI's form.

``/health`` and ``/ready`` are open to all, for process monitors. Everything else needs a key where keys are set;
``/metrics`` needs one with that permission.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_fed.errors import ErrorCode, GymError
from gym_fed.serving.http.gateway import Gateway
from gym_fed.serving.http.metrics import Metrics
from gym_fed.serving.http.rate_limits import RateLimited
from gym_fed.serving.http.waiting import ClientGone, EventStream, RequestTimeout
from gym_fed.serving.openai.adapters import LOAD, UNLOAD, Adapters
from gym_fed.serving.openai.answers import StreamChunk
from gym_fed.serving.openai.fields import unsupported
from gym_fed.serving.openai.pending import Pending, PendingVectors
from gym_fed.serving.openai.refusals import RequestError, error_body
from gym_fed.serving.openai.responses import RESPONSES
from gym_fed.serving.openai.service import CHAT, COMPLETIONS, EMBEDDINGS, STORED, URLS
from gym_fed.serving.openai.tokenizing import DETOKENIZE, TOKENIZE

GONE_STATUS = 499
"""The status in metrics of a request whose client disconnected; it is never sent."""

_log = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(gateway: Gateway) -> Starlette:
    """The application over a gateway, which may get its model later."""
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
        if not gateway.gate.caller(request.headers).metrics:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                "this key may not read the metrics, which cover everybody's requests",
                "make one that may: gym api keys add NAME --metrics --no-base",
            )
        text, kind = await run_in_threadpool(metrics.text)
        return Response(text, media_type=kind)

    @_route(app, "GET", "/v1/models")
    async def models(request: Request) -> Response:
        caller = gateway.gate.caller(request.headers)
        catalogue = gateway.open().service.catalogue

        def data() -> list[dict[str, Any]]:
            return [model.to_dict() for model in catalogue.list(caller)]

        return JSONResponse({"object": "list", "data": await run_in_threadpool(data)})

    @_route(app, "GET", "/v1/models/{name:path}")
    async def model(request: Request) -> Response:
        caller = gateway.gate.caller(request.headers)
        catalogue = gateway.open().service.catalogue
        found = await run_in_threadpool(catalogue.resolve, request.path_params["name"], caller)
        return JSONResponse(found.to_dict())

    @_route(app, "POST", CHAT)
    async def chat(request: Request) -> Response:
        return await _answer(gateway, CHAT, request)

    @_route(app, "POST", COMPLETIONS)
    async def completions(request: Request) -> Response:
        return await _answer(gateway, COMPLETIONS, request)

    @_route(app, "POST", EMBEDDINGS)
    async def embeddings(request: Request) -> Response:
        return await _answer(gateway, EMBEDDINGS, request)

    @_route(app, "POST", RESPONSES)
    async def responses(request: Request) -> Response:
        return await _answer(gateway, RESPONSES, request)

    for url in STORED:
        _serve_stored(app, gateway, url)

    @_route(app, "POST", TOKENIZE)
    async def tokenize(request: Request) -> Response:
        return await _tokens(gateway, TOKENIZE, request)

    @_route(app, "POST", DETOKENIZE)
    async def detokenize(request: Request) -> Response:
        return await _tokens(gateway, DETOKENIZE, request)

    @_route(app, "POST", LOAD)
    async def load_adapter(request: Request) -> Response:
        return await _manage(gateway, LOAD, request)

    @_route(app, "POST", UNLOAD)
    async def unload_adapter(request: Request) -> Response:
        return await _manage(gateway, UNLOAD, request)

    _handle_errors(app, gateway)
    return app


def _route(app: Starlette, method: str, path: str) -> Callable[[Endpoint], Endpoint]:
    def add(endpoint: Endpoint) -> Endpoint:
        app.add_route(path, endpoint, methods=[method])
        return endpoint

    return add


def _serve_stored(app: Starlette, gateway: Gateway, url: str) -> None:
    """Read and delete the answers that a caller has stored."""

    @_route(app, "GET", f"{url}/{{answer_id}}")
    async def stored(request: Request) -> Response:
        caller = gateway.gate.caller(request.headers)
        service = gateway.open().service
        _refuse_query(request)
        answer_id = request.path_params["answer_id"]
        return JSONResponse(await run_in_threadpool(service.stored, url, answer_id, caller))

    @_route(app, "DELETE", f"{url}/{{answer_id}}")
    async def delete_stored(request: Request) -> Response:
        caller = gateway.gate.caller(request.headers)
        service = gateway.open().service
        answer_id = request.path_params["answer_id"]
        return JSONResponse(await run_in_threadpool(service.delete_stored, url, answer_id, caller))


def _refuse_query(request: Request) -> None:
    """Refuse to stream what is stored, or to add to it."""
    for name, value in request.query_params.items():
        if (name, value) != ("stream", "false"):
            raise unsupported(name[:80])


async def _tokens(gateway: Gateway, url: str, request: Request) -> Response:
    caller = gateway.gate.caller(request.headers)
    service = gateway.open().service
    shares = gateway.limits.admit(caller)
    body = await _body(gateway, request)
    async with gateway.parser_slot(caller):
        found = await run_in_threadpool(service.tokenizing.answer, url, body, caller)
    return JSONResponse(found, headers=shares)


async def _manage(gateway: Gateway, url: str, request: Request) -> Response:
    caller = gateway.gate.caller(request.headers)
    serving = gateway.open()
    adapters = Adapters(serving.store, serving.config.adapters_folder, serving.service.catalogue)
    shares = gateway.limits.admit(caller)
    body = await _body(gateway, request)
    async with gateway.parser_slot(caller):
        said = await run_in_threadpool(adapters.answer, url, body, caller)
    return PlainTextResponse(said, headers=shares)


async def _body(gateway: Gateway, request: Request) -> Any:
    try:
        async with asyncio.timeout(gateway.request_timeout_seconds):
            return await read_json(request)
    except TimeoutError as error:
        raise GymError(ErrorCode.DEADLINE_EXCEEDED, "the request's body did not arrive in time") from error


async def _answer(gateway: Gateway, url: str, request: Request) -> Response:
    caller = gateway.gate.caller(request.headers)
    service = gateway.open().service
    shares = gateway.limits.admit(caller)
    body = await _body(gateway, request)
    timeout = RequestTimeout(request.receive, gateway.request_timeout_seconds, gateway.stopped)
    pending: Pending | PendingVectors
    async with gateway.parser_slot(caller):
        if url == EMBEDDINGS:
            pending = await run_in_threadpool(service.begin_vectors, body, caller)
        else:
            pending = await run_in_threadpool(service.begin, url, body, caller)

    def end() -> None:
        pending.end()
        gateway.limits.spend(caller, pending.used_tokens)

    if isinstance(pending, Pending) and body.get("stream"):
        response = await _stream(pending, timeout, gateway, end)
        response.headers.update(shares)
        return response
    try:
        found = await timeout.wait(pending.arun())
    finally:
        end()
    return await run_in_threadpool(JSONResponse, found, headers=shares)


async def _stream(
    pending: Pending, timeout: RequestTimeout, gateway: Gateway, end: Callable[[], None]
) -> Response:
    """A stream that starts with its first chunk, so that an earlier failure has a status of its own."""
    chunks = pending.achunks()

    async def next_one() -> dict[str, Any]:
        return await anext(chunks)

    def failure(error: GymError) -> StreamChunk:
        return pending.failure(gateway.errors.body(error))

    try:
        first = await timeout.wait(next_one())
    except BaseException:
        end()
        raise
    return EventStream(first, chunks, timeout, failure, end, with_done=pending.ends_with_done)


def _handle_errors(app: Starlette, gateway: Gateway) -> None:
    """Answer every error in the form that OpenAI's clients read."""

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

    async def no_route(request: Request, error: HTTPException) -> Response:
        message = f"{request.method} {request.url.path}: {str(error.detail).lower()}"
        refused = RequestError(
            message,
            name="method_not_allowed" if error.status_code == 405 else None,
            code=ErrorCode.NOT_FOUND,
            hint=f"there are GET /v1/models, POST {', '.join(URLS)}",
        )
        return JSONResponse(error_body(refused), error.status_code, error.headers)

    async def defect(request: Request, error: Exception) -> Response:
        return response_of(GymError(ErrorCode.INTERNAL, "the server failed", "its log has the trace"))

    handlers: dict[type[Exception], Any] = {
        GymError: refused,
        ClientGone: gone,
        HTTPException: no_route,
        Exception: defect,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


class _Measured:
    """ASGI middleware: counts requests, and the active ones for answers."""

    def __init__(self, app: ASGIApp, gateway: Gateway, metrics: Metrics) -> None:
        self._app = app
        self._gateway = gateway
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, ended = GONE_STATUS, False

        async def sending(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        began = time.monotonic()
        try:
            if scope["method"] == "POST" and scope["path"] in URLS:
                with self._gateway.counting():
                    await self._app(scope, receive, sending)
            else:
                await self._app(scope, receive, sending)
        except Exception:
            status, ended = ErrorCode.INTERNAL.http_status, True
            raise
        finally:
            self._metrics.observe(scope["path"], status if ended else GONE_STATUS, time.monotonic() - began)


MAX_BODY_BYTES = 8 * 2**20


async def read_json(request: Request) -> Any:
    """The parsed body.

    Raises:
        GymError: ``TOO_LARGE``; ``USAGE`` for another content type (as a web form sends) or no JSON.
        ClientGone: The client disconnected before the end of the body.
    """
    kind, _, more = request.headers.get("content-type", "").partition(";")
    kind = kind.strip().lower()
    if kind != "application/json":
        raise RequestError(f"content type {kind!r} is not application/json", hint="send JSON")
    charset = more.strip().lower().replace('"', "")
    if charset not in ("", "charset=utf-8", "charset=utf8"):
        raise RequestError(f"content type with {charset!r} is not supported: JSON is UTF-8")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(f"content encoding {encoding!r} is not supported", hint="send it as it is")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > MAX_BODY_BYTES:
        raise _too_large()
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > MAX_BODY_BYTES:
                raise _too_large()
    except ClientDisconnect as error:
        raise ClientGone from error
    try:
        return json.loads(data, parse_constant=_no_number, object_pairs_hook=_each_once)
    except (ValueError, RecursionError) as error:
        said = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise RequestError(f"the body is not JSON: {said}", name="invalid_json") from error


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a repeated name, one of whose values would be ignored."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:80]!r} is there twice in one object")
        found[name] = value
    return found


def _too_large() -> GymError:
    return RequestError(
        f"the body is larger than {MAX_BODY_BYTES} bytes",
        code=ErrorCode.TOO_LARGE,
        hint="send less text at once",
    )
