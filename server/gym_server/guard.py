"""The door of every call: authenticate from the metadata before the first byte of the body, map errors, log failures.

An unauthenticated stream is refused while its body is still on the wire; gRPC's own message cap holds before
anything is buffered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc

from gym_fed.errors import ErrorCode, GymError
from gym_fed.system_errors import system_error
from gym_fed.wire.errors import to_status
from gym_fed.wire.limits import SESSION_KEY
from gym_server.accounts import Accounts, Session
from gym_server.keys import RevokedKey

log = logging.getLogger("gym_server")

OPEN_METHODS = {"Status", "Enrol", "Authenticate", "LedgerHeads", "LedgerProof", "RotateKey", "RevokeKey"}
_session: ContextVar[Session | None] = ContextVar("session", default=None)


def current_session() -> Session:
    """The authenticated caller of the call being served."""
    session = _session.get()
    if session is None:
        raise GymError(ErrorCode.UNAUTHENTICATED, "this call needs a session", "enrol, then authenticate")
    return session


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps every handler of the service."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        method = details.method.rsplit("/", 1)[-1]
        token = str(dict(details.invocation_metadata or ()).get(SESSION_KEY, ""))
        is_open = method in OPEN_METHODS
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                self._stream(handler.unary_stream, method, token, is_open),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.request_streaming:
            return grpc.stream_unary_rpc_method_handler(
                self._unary(handler.stream_unary, method, token, is_open),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(handler.unary_unary, method, token, is_open),
            handler.request_deserializer,
            handler.response_serializer,
        )

    async def _authenticate(self, token: str, is_open: bool) -> None:
        if not is_open:
            _session.set(await asyncio.to_thread(self._accounts.session, token))

    async def _note(self, method: str, error: Exception) -> None:
        """The ledger tells that a revoked key was refused."""
        if isinstance(error, RevokedKey):
            await asyncio.to_thread(self._accounts.keys.refused, error.contributor, method)

    def _unary(self, behaviour: Any, method: str, token: str, is_open: bool) -> Any:
        async def call(request: Any, context: Any) -> Any:
            try:
                await self._authenticate(token, is_open)
                return await behaviour(request, context)
            except Exception as error:  # noqa: BLE001 (every failure must become a status)
                await self._note(method, error)
                await _abort(context, method, error)

        return call

    def _stream(self, behaviour: Any, method: str, token: str, is_open: bool) -> Any:
        async def call(request: Any, context: Any) -> AsyncIterator[Any]:
            try:
                await self._authenticate(token, is_open)
                async for item in behaviour(request, context):
                    yield item
            except Exception as error:  # noqa: BLE001
                await self._note(method, error)
                await _abort(context, method, error)

        return call


async def _abort(context: Any, method: str, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    failed = system_error(error, with_place=False)
    if failed is not None and not isinstance(error, GymError):
        log.error("%s failed: %s", method, system_error(error))
        error = GymError(failed.code, f"the hub cannot do this now: {failed.message}", "tell the coordinator")
    if not isinstance(error, GymError):
        log.exception("%s failed", method, exc_info=error)
        error = GymError(
            ErrorCode.INTERNAL, f"{method} failed on the server", "the coordinator's log has the trace"
        )
    else:
        log.info("%s refused: %s: %s", method, error.code.value, error.message)
    status, details, trailer = to_status(error)
    await context.abort(status, details, trailer)
