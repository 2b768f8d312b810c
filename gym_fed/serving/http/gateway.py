"""The state of the HTTP server: limits, authorization, and whether it is loading, ready or draining."""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.http.keys import Authenticator
from gym_fed.serving.http.rate_limits import RateLimited, RateLimits
from gym_fed.serving.openai.catalogue import Caller
from gym_fed.serving.openai.refusals import RequestError, error_body

if TYPE_CHECKING:
    from gym_fed.serving.setup import Serving


_LOADING_SECONDS, _DRAINING_SECONDS = 5, 10
FORGET_SECONDS = 30.0
"""Seconds between two checks for expired stored answers."""

_PARSERS_PER_CALLER = 4
"""Maximum number of the 40 parser threads that one caller may use at once."""


class Gateway:
    """The state that all requests share; methods must be called on the event loop's thread.

    Args:
        authenticator: The authenticator of callers.
        request_timeout_seconds: Timeout of one request, including queueing and streaming.

    Attributes:
        serving: The loaded parts; None until the model is loaded.
        active: The number of active requests for answers.
        draining: True if new requests are refused, because the server is about to stop.
        stopped: An event that is set when active requests are cancelled.
        limits: The rate limits of keys.
        errors: Formatter of errors for callers.
        picture_slots: Slots for requests that read pictures.
        bodies: The bytes of request bodies in memory.
    """

    def __init__(self, authenticator: Authenticator, *, request_timeout_seconds: float) -> None:
        self.authenticator = authenticator
        self.request_timeout_seconds = request_timeout_seconds
        self.serving: Serving | None = None
        self.active = 0
        self.draining = False
        self.stopped = asyncio.Event()
        self.limits = RateLimits()
        self.errors = PublicErrors()
        self.picture_slots = PictureSlots()
        self.bodies = HeldBodies()
        self._parsers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count a request for an answer as active, from the first byte to the last."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    @asynccontextmanager
    async def parser_slot(self, caller: Caller) -> AsyncIterator[None]:
        """Limit the number of parser threads that one caller uses at once."""
        slots = self._parsers.get(caller.name)
        if slots is None:
            self._parsers[caller.name] = slots = asyncio.Semaphore(_PARSERS_PER_CALLER)
        async with slots:
            yield

    async def watch(self) -> None:
        """Delete expired stored answers until cancelled, even without requests."""
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            if self.serving is not None:
                self.serving.service.forget_old_answers()

    def open(self) -> Serving:
        """Return the loaded parts of the server.

        Raises:
            GymError: ``UNAVAILABLE`` before the model is loaded, and while draining.
        """
        if self.draining:
            raise GymError(ErrorCode.UNAVAILABLE, "the server is shutting down", "try again in a moment")
        if self.serving is None:
            # The hint has no URL, since ``PublicErrors`` would remove it like a path, and log every reply to a probe.
            raise GymError(ErrorCode.UNAVAILABLE, "the model is being loaded", "try again in a moment")
        return self.serving

    def require_ready(self) -> None:
        """Raise as ``open`` does, or if the engine's steps fail or the keys cannot be read; for load balancers.

        An engine whose last steps failed still gets requests, since one successful step makes it healthy again.

        Raises:
            GymError: ``UNAVAILABLE``.
        """
        if not self.open().engine.stats().healthy:
            raise GymError(ErrorCode.UNAVAILABLE, "the engine is failing", "restart the server; see its log")
        self.authenticator.require_usable()

    def retry_after(self, error: GymError) -> int | None:
        """Return the seconds for the header ``Retry-After``; None for errors that a retry cannot fix."""
        if isinstance(error, RateLimited):
            return error.retry_after
        if error.code is ErrorCode.BUSY and self.serving is not None:
            return max(1, round(self.serving.engine.retry_after_seconds()))
        if error.code in (ErrorCode.UNAVAILABLE, ErrorCode.BUSY):
            return _DRAINING_SECONDS if self.draining else _LOADING_SECONDS
        return None


SLOTS = 3
PER_CALLER = 2
"""Maximum slots of one caller, so that one picture is prepared while another is in the vision tower."""
MAX_WAITING = 16
"""Maximum waiting requests of one caller, each of which holds its body in memory."""

_FIRST_GUESS = 0.1
"""Assumed seconds per picture until one has been measured."""
_WEIGHT = 0.1
"""Weight of the last request in the mean."""


@dataclass(frozen=True, eq=False)
class _Waiter:
    caller: str
    pictures: int
    turn: asyncio.Future[None]


class PictureSlots:
    """Slots for requests that read pictures, least served caller first; for use on the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: list[_Waiter] = []
        self._running: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._least = 0.0
        """The seconds used by the caller that was served last; new callers start with this value."""
        self._per_picture = _FIRST_GUESS

    async def take(self, caller: str, pictures: int) -> None:
        """Wait for a slot; ``give_back`` frees it.

        Args:
            caller: The caller's name.
            pictures: The number of pictures in the request.

        Raises:
            GymError: ``BUSY``.
        """
        if sum(other.caller == caller for other in self._waiting) >= MAX_WAITING:
            raise GymError(
                ErrorCode.BUSY,
                f"{MAX_WAITING} requests of this user are already waiting for their images to be read",
                "try again when some are answered",
            )
        waiter = _Waiter(caller, pictures, asyncio.get_running_loop().create_future())
        self._seconds[caller] = max(self._seconds.get(caller, 0.0), self._least)
        self._waiting.append(waiter)
        self._next()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            else:
                self.give_back(caller, 0, 0.0)
            raise

    def give_back(self, caller: str, pictures: int, seconds: float) -> None:
        """Free a slot that was held for ``seconds`` to read ``pictures``."""
        self._running[caller] -= 1
        if pictures:
            self._per_picture += _WEIGHT * (seconds / pictures - self._per_picture)
        self._seconds[caller] += seconds
        self._next()

    def _expected_use(self, waiter: _Waiter) -> float:
        """Estimate the seconds that a caller will have used when this request is answered."""
        return self._seconds[waiter.caller] + waiter.pictures * self._per_picture

    def _next(self) -> None:
        while self._running.total() < SLOTS:
            able = [waiter for waiter in self._waiting if self._running[waiter.caller] < PER_CALLER]
            if not able:
                break
            first = min(able, key=self._expected_use)  # on a tie, the oldest
            self._waiting.remove(first)
            self._running[first.caller] += 1
            self._least = max(self._least, self._seconds[first.caller])
            first.turn.set_result(None)
        self._running = +self._running
        active = self._running.keys() | {waiter.caller for waiter in self._waiting}
        self._seconds = {
            caller: seconds
            for caller, seconds in self._seconds.items()
            if caller in active or seconds > self._least
        }


MAX_HELD_BYTES = 1 << 30
"""Maximum size in bytes of all callers, shared evenly by those that hold bodies."""
MAX_BYTES_PER_CALLER = 128 << 20
MIN_BYTES_PER_CALLER = 16 << 20
"""Bytes that every caller may hold: two bodies of the largest size."""


class HeldBodies:
    """Bytes of request bodies that are held until they are parsed, limited per caller.

    Bodies may arrive slowly, on hundreds of connections at once. Without a limit, one key could fill the memory. For
    use on the event loop's thread.
    """

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._bytes.total()

    def hold(self, caller: str) -> HeldBody:
        """Start counting a body."""
        return HeldBody(self._bytes, caller)


class HeldBody:
    """The bytes of one body; use ``HeldBodies.hold``."""

    def __init__(self, held: Counter[str], caller: str) -> None:
        self._held, self._caller, self._own = held, caller, 0

    def add(self, size: int) -> None:
        """Count bytes that have arrived.

        Raises:
            GymError: ``BUSY`` if the caller holds too much.
        """
        self._own += size
        self._held[self._caller] += size
        share = min(MAX_BYTES_PER_CALLER, max(MIN_BYTES_PER_CALLER, MAX_HELD_BYTES // len(self._held)))
        if self._held[self._caller] > share:
            raise GymError(
                ErrorCode.BUSY,
                f"unread requests of this user exceed {counted(share, 'byte')}",
                "send fewer large requests at once",
            )

    def end(self) -> None:
        """Stop counting a body that is parsed or abandoned."""
        self._held[self._caller] -= self._own
        self._own = 0
        if not self._held[self._caller]:
            del self._held[self._caller]


_log = logging.getLogger(__name__)

_SERVER_ERRORS = frozenset(
    {
        ErrorCode.CONFIG_INVALID,
        ErrorCode.DISK_FULL,
        ErrorCode.FILE_NOT_FOUND,
        ErrorCode.INTERNAL,
        ErrorCode.MODEL_INVALID,
        ErrorCode.MODEL_NOT_FOUND,
        ErrorCode.NOT_WRITABLE,
        ErrorCode.STATE_CORRUPT,
        ErrorCode.STATE_LOCKED,
    }
)
"""Codes whose messages name files on the server; the caller gets the code's help text instead."""
_PATH = re.compile(r"""\s?\(?(?<![\w/.:])~?(?:[A-Za-z]:)?[/\\][^\s'"(),;]*[^\s'"(),;:.]\)?""")
_DIGEST = re.compile(r"(?:sha256:)?(?<![0-9A-Za-z])c?[0-9a-f]{12,}(?![0-9A-Za-z])")
_REMEMBERED = 256


class PublicErrors:
    """Formats errors for callers; server paths and digests are removed and only logged. Not thread-safe."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, None] = OrderedDict()

    def body(self, error: GymError) -> dict[str, Any]:
        """Return OpenAI's form of an error. The full text is logged, each text once."""
        if isinstance(error, RequestError):
            return error_body(error)
        shown = _without_details(error)
        if str(shown) != str(error):
            self._log(str(error))
        return error_body(shown)

    def _log(self, text: str) -> None:
        if text not in self._logged:
            _log.warning("the caller got a shortened form of this error: %s", text)
        self._logged[text] = None
        self._logged.move_to_end(text)
        while len(self._logged) > _REMEMBERED:
            self._logged.popitem(last=False)


def _without_details(error: GymError) -> GymError:
    if error.code in _SERVER_ERRORS:
        message = "the server failed" if error.code is ErrorCode.INTERNAL else error.code.help.rstrip(".")
        return GymError(error.code, message, "see the server's log")
    return GymError(error.code, _scrubbed(error.message), _scrubbed(error.hint))


def _scrubbed(text: str) -> str:
    return _DIGEST.sub("...", _PATH.sub(" a file of the server", text)).strip()
