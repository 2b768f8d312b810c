"""The HTTP server's state: what it serves, who is authorized, and whether it is loading, ready or draining."""

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
from gym_fed.serving.http.keys import Gate
from gym_fed.serving.http.rate_limits import RateLimited, RateLimits
from gym_fed.serving.openai.catalogue import Caller
from gym_fed.serving.openai.refusals import RequestError, error_body

if TYPE_CHECKING:
    from gym_fed.serving.setup import Serving


_LOADING_SECONDS, _DRAINING_SECONDS = 5, 10
FORGET_SECONDS = 30.0
"""Between looks for stored answers whose time is over."""

_PARSERS_PER_CALLER = 4
"""Of the 40 threads that parse requests, those that one caller may have at once."""


class Gateway:
    """Shared by all requests; all but ``__init__`` is for the event loop's thread.

    Args:
        gate: Authenticates callers.
        request_timeout_seconds: Timeout of one request, queueing and streaming included.

    Attributes:
        serving: None until the model is loaded.
        active: Active requests for answers.
        draining: Whether new requests are refused, because the server is about to stop.
        stopped: Set when active requests are cancelled, too.
        limits: What each key has left of its share.
        errors: What of an error its caller gets.
        picture_slots: Who reads pictures next.
        bodies: Those that are held.
    """

    def __init__(self, gate: Gate, *, request_timeout_seconds: float) -> None:
        self.gate = gate
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
        """Count a request for an answer as active, from its first byte to its last."""
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    @asynccontextmanager
    async def parser_slot(self, caller: Caller) -> AsyncIterator[None]:
        """Parsing a request takes one of few threads: limit how many one caller has at once."""
        slots = self._parsers.get(caller.name)
        if slots is None:
            self._parsers[caller.name] = slots = asyncio.Semaphore(_PARSERS_PER_CALLER)
        async with slots:
            yield

    async def watch(self) -> None:
        """Forget stored answers when their time is over, also while no request comes; until it is cancelled."""
        while True:
            await asyncio.sleep(FORGET_SECONDS)
            if self.serving is not None:
                self.serving.service.forget_old_answers()

    def open(self) -> Serving:
        """The running server's parts.

        Raises:
            GymError: ``UNAVAILABLE`` before the model is loaded, and while draining.
        """
        if self.draining:
            raise GymError(ErrorCode.UNAVAILABLE, "the server is shutting down", "try again in a moment")
        if self.serving is None:
            raise GymError(
                ErrorCode.UNAVAILABLE, "the model is being loaded", "GET /ready answers 200 when it is loaded"
            )
        return self.serving

    def require_ready(self) -> None:
        """For load balancers: raise as ``open``, and when the engine's steps fail or the keys cannot be read.

        Requests still reach an engine whose last steps failed, because it is healthy again after a step that succeeds.

        Raises:
            GymError: ``UNAVAILABLE``.
        """
        if not self.open().engine.stats().healthy:
            raise GymError(ErrorCode.UNAVAILABLE, "the engine fails", "see the server's log; restart it")
        self.gate.require_usable()

    def retry_after(self, error: GymError) -> int | None:
        """Seconds of the header ``Retry-After``, for errors that may pass."""
        if isinstance(error, RateLimited):
            return error.retry_after
        if error.code is ErrorCode.BUSY and self.serving is not None:
            return max(1, round(self.serving.engine.retry_after_seconds()))
        if error.code in (ErrorCode.UNAVAILABLE, ErrorCode.BUSY):
            return _DRAINING_SECONDS if self.draining else _LOADING_SECONDS
        return None


SLOTS = 3
PER_CALLER = 2
"""Of the slots; one picture is prepared while another is in the vision tower."""
MOST_WAITING = 16
"""Requests of one caller, each of which holds its body."""

_FIRST_GUESS = 0.1
"""Seconds a picture."""
_WEIGHT = 0.1
"""Of the last request in the mean."""


@dataclass(frozen=True, eq=False)
class _Waiter:
    caller: str
    pictures: int
    turn: asyncio.Future[None]


class PictureSlots:
    """For the event loop's thread."""

    def __init__(self) -> None:
        self._waiting: list[_Waiter] = []
        self._running: Counter[str] = Counter()
        self._seconds: dict[str, float] = {}
        self._least = 0.0
        """Of the seconds of those whose turn came; who comes anew begins there."""
        self._per_picture = _FIRST_GUESS

    async def take(self, caller: str, pictures: int) -> None:
        """Wait for a slot, which ``give_back`` frees again.

        Args:
            caller: The caller of the request.
            pictures: How many it has.

        Raises:
            GymError: ``BUSY``.
        """
        if sum(one.caller == caller for one in self._waiting) >= MOST_WAITING:
            raise GymError(
                ErrorCode.BUSY,
                f"{MOST_WAITING} requests of this user wait to have their pictures read",
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
        """Free a slot that was held for so long, to read so many."""
        self._running[caller] -= 1
        if pictures:
            self._per_picture += _WEIGHT * (seconds / pictures - self._per_picture)
        self._seconds[caller] += seconds
        self._next()

    def _used_then(self, one: _Waiter) -> float:
        """Seconds of a caller when this request is answered."""
        return self._seconds[one.caller] + one.pictures * self._per_picture

    def _next(self) -> None:
        while self._running.total() < SLOTS:
            able = [one for one in self._waiting if self._running[one.caller] < PER_CALLER]
            if not able:
                break
            first = min(able, key=self._used_then)  # of equals the oldest
            self._waiting.remove(first)
            self._running[first.caller] += 1
            self._least = max(self._least, self._seconds[first.caller])
            first.turn.set_result(None)
        self._running = +self._running
        active = self._running.keys() | {one.caller for one in self._waiting}
        self._seconds = {
            caller: seconds
            for caller, seconds in self._seconds.items()
            if caller in active or seconds > self._least
        }


MOST = 1 << 30
"""Of all callers, shared evenly among those that hold some."""
MOST_OF_CALLER = 128 << 20
LEAST_OF_CALLER = 16 << 20
"""A caller always has so much: two bodies of the largest size."""


class HeldBodies:
    """For the event loop's thread."""

    def __init__(self) -> None:
        self._bytes: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._bytes.total()

    def hold(self, caller: str) -> HeldBody:
        """A body that begins to come."""
        return HeldBody(self._bytes, caller)


class HeldBody:
    """Use ``HeldBodies.hold``.

    Args:
        held: Bytes by caller.
        caller: Whose it is.
    """

    def __init__(self, held: Counter[str], caller: str) -> None:
        self._held, self._caller, self._own = held, caller, 0

    def add(self, size: int) -> None:
        """Some of it has come.

        Raises:
            GymError: ``BUSY`` where its caller holds too much.
        """
        self._own += size
        self._held[self._caller] += size
        share = min(MOST_OF_CALLER, max(LEAST_OF_CALLER, MOST // len(self._held)))
        if self._held[self._caller] > share:
            raise GymError(
                ErrorCode.BUSY,
                f"requests of this user that are not read yet have more than {share:,} bytes",
                "send fewer large requests at once",
            )

    def end(self) -> None:
        """It is read, or given up."""
        self._held[self._caller] -= self._own
        self._own = 0
        if not self._held[self._caller]:
            del self._held[self._caller]


_log = logging.getLogger(__name__)

_ABOUT_THE_SERVER = frozenset(
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
"""Codes whose messages name what the server has on its disk; the caller gets the code's own sentence."""
_PATH = re.compile(r"""\s?\(?(?<![\w/.:])~?(?:[A-Za-z]:)?[/\\][^\s'"(),;]*[^\s'"(),;:.]\)?""")
_DIGEST = re.compile(r"(?:sha256:)?(?<![0-9A-Za-z])c?[0-9a-f]{12,}(?![0-9A-Za-z])")
_REMEMBERED = 256


class PublicErrors:
    """Errors as answers' bodies; for one thread."""

    def __init__(self) -> None:
        self._logged: OrderedDict[str, None] = OrderedDict()

    def body(self, error: GymError) -> dict[str, Any]:
        """OpenAI's form of an error. What it leaves out goes to the log, once for the same text."""
        if isinstance(error, RequestError):
            return error_body(error)
        shown = _without_insides(error)
        if str(shown) != str(error):
            self._log(str(error))
        return error_body(shown)

    def _log(self, text: str) -> None:
        if text not in self._logged:
            _log.warning("an error was shortened for its caller: %s", text)
        self._logged[text] = None
        self._logged.move_to_end(text)
        while len(self._logged) > _REMEMBERED:
            self._logged.popitem(last=False)


def _without_insides(error: GymError) -> GymError:
    if error.code in _ABOUT_THE_SERVER:
        message = "the server failed" if error.code is ErrorCode.INTERNAL else error.code.help.rstrip(".")
        return GymError(error.code, message, "the server's log says more")
    return GymError(error.code, _scrubbed(error.message), _scrubbed(error.hint))


def _scrubbed(text: str) -> str:
    return _DIGEST.sub("...", _PATH.sub(" a file of the server", text)).strip()
