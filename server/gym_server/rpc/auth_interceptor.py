"""Authentication, rate limits and error handling of every gRPC call.

A call is checked before its body is read. Callers with a session are limited by account, others by the address of their
connection, so that a flood slows down only its sender. A refusal of a call over a limit is delayed, so that a
caller that retries in a loop costs the hub little. gRPC's own message limit applies before anything is buffered.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

import grpc

from gym_fed.config.hub.sections import LimitsConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.system_errors import system_error
from gym_fed.trust.wire.errors import to_status
from gym_fed.trust.wire.limits import SESSION_KEY
from gym_server.accounts.accounts import Session
from gym_server.accounts.keys import RevokedKey
from gym_server.observe.instruments import CALL_SECONDS, timed
from gym_server.rpc.limits import CallSlots, TokenBuckets, address_of
from gym_server.store.unavailable import StoreUnavailable
from gym_server.traffic import HubTraffic

log = logging.getLogger("gym_server")

OPEN_METHODS = {
    "Status",
    "Base",
    "Enrol",
    "Authenticate",
    "LedgerHeads",
    "LedgerProof",
    "RotateKey",
    "RevokeKey",
    "Check",
}
LEFT_METHODS = {"Account", "Ledger", "Transfer"}
"""Calls that an account may make after it has left, since it keeps its credits."""
LONG_METHODS = {"Work"}
"""Calls that last for hours. They use no call slot and are limited by ``WorkStreams``."""

BURST_SECONDS = 4.0
"""Burst size of the rate limits, as the number of seconds of calls at the full rate."""
REQUEST_SECONDS = 20.0
"""Timeout for the single request message of a call, in seconds."""
WRITE_SECONDS = 60.0
"""Timeout for sending a stream's next message to the caller, in seconds."""
_REFUSAL_SECONDS = 5.0
"""Delay before a call over a limit is refused, in seconds. It limits a thousand callers in a loop to 200 calls per
second."""
_MAX_REFUSALS_WAITING = 4_000
_STREAMS_PER_SECOND = 0.5
"""Sustained rate at which an account may open work streams, in streams per second; opening one writes to the database.
"""
_MAX_TOKENS = 4_096
MINUTE_SECONDS = 60.0
MAX_LINES = 100
"""Maximum number of kinds of refusal that are counted separately per minute; all others share one count."""
_REST = ("others", "", "")

_session: ContextVar[Session | None] = ContextVar("session", default=None)
_address: ContextVar[str] = ContextVar("address", default="")


def current_session() -> Session:
    """Return the authenticated caller of the call being served."""
    session = _session.get()
    if session is None:
        raise GymError(ErrorCode.UNAUTHENTICATED, "this call needs a session", "enrol, then authenticate")
    return session


def current_address() -> str:
    """Return the address that the served call's limits apply to: an IPv4 address or an IPv6 network."""
    return _address.get()


class Sessions(Protocol):
    """The interceptor's interface to accounts, implemented by those of a hub and of a mirror."""

    def session(self, token: str) -> Session:
        """Return the session of a token; raises ``UNAUTHENTICATED`` or ``RevokedKey``."""

    def note_revoked(self, contributor: str, method: str) -> None:
        """Record that a call was refused because its key is revoked."""


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps every handler of the service with authentication, limits and error handling.

    Args:
        accounts: The accounts, which verify sessions.
        limits: Rates and call slots per account and per address.
        on_call: Called with the peer of every call, in gRPC's notation.
        traffic: Counters of calls and refusals.
        clock: Monotonic clock of the rate limits in seconds; tests pass their own.
    """

    def __init__(
        self,
        accounts: Sessions,
        limits: LimitsConfig | None = None,
        on_call: Callable[[str], None] = lambda peer: None,
        traffic: HubTraffic | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limits = limits or LimitsConfig()
        self._accounts, self._on_call = accounts, on_call
        self._traffic = traffic or HubTraffic()
        self._refusals = Refusals()
        self._known: OrderedDict[str, str] = OrderedDict()  # account by valid token
        burst = max(1.0, BURST_SECONDS * limits.calls_per_second)
        own_burst = max(1.0, 2 * BURST_SECONDS * limits.calls_per_second_of_account)
        self._account_rates = TokenBuckets(limits.calls_per_second_of_account, own_burst, clock=clock)
        self._address_rates = TokenBuckets(limits.calls_per_second, burst, clock=clock)
        self._stream_rates = TokenBuckets(_STREAMS_PER_SECOND, 2.0 * limits.nodes_per_account, clock=clock)
        self._account_slots = CallSlots(limits.calls_per_account)
        self._address_slots = CallSlots(limits.calls_per_address)
        self._refused_waiting = 0

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(details)
        if handler is None:
            return None
        method = details.method.rsplit("/", 1)[-1]
        token = str(dict(details.invocation_metadata or ()).get(SESSION_KEY, ""))
        # Every handler takes a request stream, since gRPC calls a unary handler only after the message has arrived.
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._stream(handler.unary_stream, method, token),
                handler.request_deserializer,
                handler.response_serializer,
            )
        behaviour = handler.stream_unary if handler.request_streaming else _one_request(handler.unary_unary)
        return grpc.stream_unary_rpc_method_handler(
            self._unary(behaviour, method, token), handler.request_deserializer, handler.response_serializer
        )

    def _unary(self, behaviour: Any, method: str, token: str) -> Any:
        async def call(requests: Any, context: Any) -> Any:
            async with self._authorised(method, token, context):
                return await behaviour(requests, context)

        return call

    def _stream(self, behaviour: Any, method: str, token: str) -> Any:
        async def call(requests: Any, context: Any) -> None:
            async with (
                self._authorised(method, token, context),
                aclosing(behaviour(await _request(requests), context)) as items,
            ):
                async for item in items:
                    try:
                        await _in_time(context.write(item), WRITE_SECONDS, "did not read the response")
                    except grpc.aio.InternalError:
                        return  # the caller has disconnected

        return call

    @asynccontextmanager
    async def _authorised(self, method: str, token: str, context: Any) -> AsyncIterator[None]:
        """Admit a call or end it with a status; exceptions inside the block are converted to a status."""
        peer = context.peer()
        address = address_of(peer)
        self._on_call(peer)
        self._traffic.called(method)
        _address.set(address)
        try:
            with self._share(method, token, address):
                if method not in OPEN_METHODS:
                    _session.set(await self._authenticate(token, method))
                with nullcontext() if method in LONG_METHODS else timed(CALL_SECONDS, method):
                    yield
        except Exception as error:  # noqa: BLE001 (every failure must become a status)
            await self._end(context, method, address, error)

    @contextmanager
    def _share(self, method: str, token: str, address: str) -> Any:
        """Apply the caller's rate limit, and hold one of its call slots for the block.

        Raises:
            GymError: ``BUSY`` if the caller is over its limit.
        """
        account = self._known.get(token)
        if account is not None:
            rates = self._stream_rates if method in LONG_METHODS else self._account_rates
            who, slots = account, self._account_slots
        else:
            who, rates, slots = address, self._address_rates, self._address_slots
        seconds = rates.take(who)
        if seconds:
            raise Busy(who, "calls too often", f"wait {seconds:.1f} s")
        with nullcontext(True) if method in LONG_METHODS else slots.taken(who) as is_free:
            if not is_free:
                raise Busy(who, "has too many calls in progress", "wait until one of them has ended")
            yield

    async def _authenticate(self, token: str, method: str) -> Session:
        try:
            session = await asyncio.to_thread(self._accounts.session, token)
        except GymError:
            self._known.pop(token, None)
            raise
        self._known[token] = session.contributor
        self._known.move_to_end(token)
        if len(self._known) > _MAX_TOKENS:
            self._known.popitem(last=False)
        if session.has_left and method not in LEFT_METHODS:
            raise GymError(
                ErrorCode.UNAUTHENTICATED, f"contributor {session.contributor!r} has left", "enrol again"
            )
        return session

    async def _end(self, context: Any, method: str, address: str, error: Exception) -> None:
        if isinstance(error, grpc.aio.AbortError):
            raise error
        if isinstance(error, RevokedKey):  # the ledger records that a revoked key was refused
            await asyncio.to_thread(self._accounts.note_revoked, error.contributor, method)
        if isinstance(error, Busy):
            await self._wait_with_refusal()
        if isinstance(error, StoreUnavailable):
            self._refusals.note("the hub", method, error.refusal, logging.ERROR)
            error = error.outside
        elif isinstance(error, GymError):
            session = _session.get()
            self._refusals.note(session.contributor if session else address, method, error)
        elif (failed := system_error(error, with_place=False)) is not None:
            self._refusals.note("the hub", method, system_error(error) or failed, logging.ERROR)
            # With these codes, contributors wait for a hub whose disk is full or failing; others would end `gym-client
            # join`.
            code = failed.code if failed.code is ErrorCode.DISK_FULL else ErrorCode.UNAVAILABLE
            error = GymError(
                code, f"the hub cannot do this now: {failed.message}", "report this to the coordinator"
            )
        else:
            self._refusals.failed(method, error)
            error = GymError(
                ErrorCode.INTERNAL,
                f"{method} failed on the server",
                "the coordinator's log has the traceback",
            )
        assert isinstance(error, GymError)
        self._traffic.refused(error.code.value)
        status, details, trailer = to_status(error)
        await context.abort(status, details, trailer)

    async def _wait_with_refusal(self) -> None:
        if self._refused_waiting >= _MAX_REFUSALS_WAITING:
            return
        self._refused_waiting += 1
        try:
            await asyncio.sleep(_REFUSAL_SECONDS)
        finally:
            self._refused_waiting -= 1


class Busy(GymError):
    """Error for a call that exceeds its caller's limits."""

    def __init__(self, who: str, what: str, hint: str) -> None:
        super().__init__(ErrorCode.BUSY, f"{who} {what}", hint)


def _one_request(behaviour: Any) -> Any:
    async def call(requests: Any, context: Any) -> Any:
        return await behaviour(await _request(requests), context)

    return call


async def _request(requests: Any) -> Any:
    """Return the single request message of a call.

    Raises:
        GymError: ``DEADLINE_EXCEEDED`` if it does not arrive in time, ``USAGE`` if there is none.
    """
    try:
        return await _in_time(anext(aiter(requests)), REQUEST_SECONDS, "sent no request")
    except StopAsyncIteration:
        raise GymError(ErrorCode.USAGE, "the call has no request message") from None


async def _in_time(work: Awaitable[Any], seconds: float, what: str) -> Any:
    try:
        return await asyncio.wait_for(work, seconds)
    except TimeoutError:
        raise GymError(ErrorCode.DEADLINE_EXCEEDED, f"the caller {what} for {seconds:.0f} s") from None


class Refusals:
    """Logs refused and failed calls: the first of each kind immediately, the others as a count per minute.

    At most ``MAX_LINES`` lines per minute are logged, so refusals cannot fill the disk. Refusals are counted by caller,
    method and code. Not thread-safe: use it on the event loop's thread.
    """

    def __init__(self, minute_seconds: float = MINUTE_SECONDS) -> None:
        self._minute_seconds = minute_seconds
        self._more: Counter[tuple[str, str, str]] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def note(self, who: str, method: str, error: GymError, level: int = logging.INFO) -> None:
        """Log or count a refused call.

        Args:
            who: The account, or the address of a caller without a session.
            method: Name of the called method.
            error: The refusal.
            level: Log level.
        """
        if self._is_first((who, method, error.code.value)):
            log.log(level, "%s refused for %s: %s: %s", method, who, error.code.value, error.message)

    def failed(self, method: str, error: Exception) -> None:
        """Log a call that failed because of a bug in the hub; the first of each kind is logged with its traceback."""
        if self._is_first(("", method, type(error).__name__)):
            log.error("%s failed", method, exc_info=error)

    def _is_first(self, kind: tuple[str, str, str]) -> bool:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._minute_seconds, self._summarise)
        if kind not in self._more and len(self._more) < MAX_LINES:
            self._more[kind] = 0
            return True
        self._more[kind if kind in self._more else _REST] += 1
        return False

    def _summarise(self) -> None:
        self._timer = None
        refused, self._more = self._more, Counter()
        for (who, method, code), count in refused.items():
            if count and method:
                log.info(
                    "%s: %d more calls ended with %s for %s in the last minute",
                    method,
                    count,
                    code,
                    who or "all callers",
                )
            elif count:
                log.info("%d more calls from other callers were refused in the last minute", count)
