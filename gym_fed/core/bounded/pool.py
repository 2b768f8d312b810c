"""A pool of warm child processes that evaluate requests; a process is killed if its request exceeds the deadline."""

from __future__ import annotations

import atexit
import json
import math
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from gym_fed.core.bounded.errors import OUTPUT_CHARS, SECONDS, Limit, LimitExceededError
from gym_fed.core.child_process import minimal_environment, module_command, start_process
from gym_fed.core.errors import ErrorCode, GymError

MAX_PROCESSES = 4
"""Maximum number of concurrent requests; others wait for a free process."""
MAX_PER_OWNER = 2
"""Maximum number of concurrent requests of one owner."""
_START_SECONDS = 120.0
"""Time limit for the imports of a child process, which are slow on a busy machine."""
_MAX_REPLY_BYTES = 8 * OUTPUT_CHARS + (1 << 16)
_TICK_SECONDS = 0.1
_IDLE_TICKS = 50

in_child = False
"""True in the child process, where templates are rendered directly. Set by ``gym_fed.core.bounded.worker``."""

_deadline: ContextVar[tuple[float, GymError] | None] = ContextVar("gym_fed_bounded_deadline", default=None)


evaluation_owner: ContextVar[str | None] = ContextVar("gym_fed_bounded_owner", default=None)
"""Owner of the current requests in a server with API keys; None without keys, in which case ``MAX_PER_OWNER`` does not
apply."""


class EvaluationError(Exception):
    """A template or a pattern raised an exception before it exceeded a limit.

    Attributes:
        kinds: Names of the exception's class and its base classes.
        line: Line number of a template's syntax error.
    """

    def __init__(self, kinds: list[str], message: str, line: int | None) -> None:
        super().__init__(message)
        self.kinds, self.line = kinds, line


def evaluate(function: Callable[..., Any], *, seconds: float | None = None, **arguments: Any) -> Any:
    """Call a function that evaluates untrusted input in a child process.

    Args:
        function: A module-level function of gym_fed; the child imports it by name.
        seconds: Time limit; ``SECONDS`` by default.
        arguments: Keyword arguments of the function; JSON values.

    Raises:
        LimitExceededError: If the call exceeds a limit on time, memory or output.
        EvaluationError: If the function raises an exception.
        GymError: If the function raises one; ``BUSY`` if no process becomes free within the time limit.
    """
    name = f"{function.__module__}:{function.__qualname__}"
    deadline, late = _deadline.get() or (math.inf, None)
    if late is not None and time.monotonic() >= deadline:
        raise late
    try:
        return _pool.evaluate(name, SECONDS if seconds is None else seconds, deadline, arguments)
    except (LimitExceededError, GymError) as error:
        if late is not None and time.monotonic() >= deadline:
            raise late from error
        raise


@contextmanager
def evaluation_deadline(deadline: float, error: GymError) -> Iterator[None]:
    """Set a deadline for all evaluations in the block, including process starts and waiting time.

    An earlier deadline of an outer block remains in force.

    Args:
        deadline: Time on the clock of ``time.monotonic``, in seconds.
        error: Raised if an evaluation starts after the deadline or does not finish before it.
    """
    outer = _deadline.get()
    token = _deadline.set(outer if outer is not None and outer[0] < deadline else (deadline, error))
    try:
        yield
    finally:
        _deadline.reset(token)


class _Process:
    """A child process; used by one thread at a time."""

    def __init__(self, watchdog: _Watchdog, start_seconds: float) -> None:
        self._watchdog = watchdog
        try:
            self._child = start_process(
                module_command("gym_fed.core.bounded.worker"),
                env=minimal_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # only the parent handles Ctrl-C at the terminal
            )
        except OSError as error:
            raise _not_started(str(error)) from error
        try:
            started = self._read(start_seconds)
        except BaseException:
            self.close()
            raise
        if started is None:
            self.close()
            raise _not_started(f"no answer in {start_seconds:.3g} s")

    def request(self, function: str, seconds: float, arguments: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply. The process must not be reused if this raises."""
        line = json.dumps(
            {"function": function, "seconds": seconds, "arguments": arguments},
            ensure_ascii=False,
            default=str,
        )
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):  # the read below reports it
            self._child.stdin.write(line.encode("utf-8", "surrogatepass") + b"\n")
            self._child.stdin.flush()
        reply = self._read(seconds)
        if reply is None:
            raise LimitExceededError("time" if self._watchdog.killed(self) else "crash", seconds)
        return reply

    def is_alive(self) -> bool:
        """Return False once the process has ended or was killed at its deadline."""
        return self._child.poll() is None and not self._watchdog.killed(self)

    def kill(self) -> None:
        """Kill the process; thread-safe."""
        self._child.kill()

    def close(self) -> None:
        """Kill the process and release its resources."""
        self._child.kill()
        self._child.wait()
        for stream in (self._child.stdin, self._child.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()

    def _read(self, seconds: float) -> dict[str, Any] | None:
        """Read one line; None if the process ended or was killed first."""
        assert self._child.stdout is not None
        self._watchdog.watch(self, seconds)
        try:
            line = self._child.stdout.readline(_MAX_REPLY_BYTES)
        finally:
            self._watchdog.release(self)
        if len(line) >= _MAX_REPLY_BYTES:
            raise LimitExceededError("output")
        if not line.endswith(b"\n"):
            return None
        reply: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
        return reply


def _not_started(reason: str) -> GymError:
    return GymError(
        ErrorCode.BUSY,
        f"the process that evaluates templates did not start: {reason}",
        "close other programs, or allow this user more processes and memory",
    )


class _Watchdog:
    """A thread that kills processes at their deadlines; it stops when there are none to watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deadlines: dict[_Process, float] = {}
        self._killed: set[_Process] = set()
        self._is_running = False

    def watch(self, process: _Process, seconds: float) -> None:
        """Kill the process after ``seconds`` unless it is released before then."""
        with self._lock:
            self._deadlines[process] = time.monotonic() + seconds
            if not self._is_running:
                threading.Thread(target=self._run, name="template-deadlines", daemon=True).start()
                self._is_running = True

    def release(self, process: _Process) -> None:
        """Stop watching a process."""
        with self._lock:
            self._deadlines.pop(process, None)

    def killed(self, process: _Process) -> bool:
        """Return True if the process was killed at its deadline; only the first call returns True."""
        with self._lock:
            was_killed = process in self._killed
            self._killed.discard(process)
            return was_killed

    def _run(self) -> None:
        idle = 0
        while True:
            time.sleep(_TICK_SECONDS)
            with self._lock:
                now = time.monotonic()
                for process in [one for one, deadline in self._deadlines.items() if deadline <= now]:
                    del self._deadlines[process]
                    self._killed.add(process)
                    process.kill()
                idle = 0 if self._deadlines else idle + 1
                if idle >= _IDLE_TICKS:
                    self._is_running = False
                    return


class _Slots:
    """Limits concurrent requests; the next one is that of the waiting owner with the fewest requests in progress."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: Counter[str | None] = Counter()
        self._waiting: dict[object, str | None] = {}
        """Owners by waiter, in the order of arrival."""

    @contextmanager
    def take(self, seconds: float) -> Iterator[None]:
        """Hold one of ``MAX_PROCESSES`` slots for the duration of the block.

        Raises:
            GymError: ``BUSY`` if none becomes free in ``seconds``.
        """
        owner, waiter = evaluation_owner.get(), object()
        with self._changed:
            self._waiting[waiter] = owner
            try:
                if not self._changed.wait_for(lambda: self._next() is waiter, max(0.0, seconds)):
                    raise GymError(
                        ErrorCode.BUSY,
                        f"all {MAX_PROCESSES} template processes were busy for {max(0.0, seconds):.3g} s",
                        "try again later",
                    )
                self._running[owner] += 1
            finally:
                del self._waiting[waiter]
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._running[owner] -= 1
                self._running = +self._running
                self._changed.notify_all()

    def _next(self) -> object | None:
        """Return the next waiter; None if no process is free for any of them."""
        if self._running.total() >= MAX_PROCESSES:
            return None
        running = {waiter: self._running[owner] for waiter, owner in self._waiting.items()}
        able = [one for one in running if self._waiting[one] is None or running[one] < MAX_PER_OWNER]
        return min(able, key=running.__getitem__, default=None)  # ties go to the oldest


class _Pool:
    def __init__(self) -> None:
        self._watchdog = _Watchdog()
        self._lock = threading.Lock()
        self._idle: list[_Process] = []
        self._slots = _Slots()

    def evaluate(self, function: str, seconds: float, deadline: float, arguments: dict[str, Any]) -> Any:
        """Call a function in a child process; ``deadline`` includes waiting for a process, ``seconds`` does not."""
        with self._slots.take(min(seconds, deadline - time.monotonic())):
            reply = self._reply(function, seconds, deadline, arguments)
        if "refused" in reply:
            code, message, hint = reply["refused"]
            raise GymError(ErrorCode(code), message, hint)
        if "error" in reply:
            raise EvaluationError(reply["error"], reply["message"], reply["line"])
        return reply["value"]

    def _reply(
        self, function: str, seconds: float, deadline: float, arguments: dict[str, Any]
    ) -> dict[str, Any]:
        process = self._living()
        try:
            if process is None:
                process = _Process(self._watchdog, min(_START_SECONDS, deadline - time.monotonic()))
            seconds = min(seconds, deadline - time.monotonic())
            reply = process.request(function, seconds, arguments)
            limit: Limit | None = reply.get("limit")
            if limit is not None:  # the process is killed: its memory may be full
                raise LimitExceededError(limit, seconds)
        except BaseException:  # including Ctrl-C: the process would otherwise send a late reply
            if process is not None:
                process.close()
            raise
        with self._lock:
            self._idle.append(process)  # ``_living`` drops a process that was killed just after its reply
        return reply

    def _living(self) -> _Process | None:
        """Return an idle process, dropping those that the system has killed."""
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            if process is None or process.is_alive():
                return process
            process.close()

    def close(self) -> None:
        """Kill all idle processes."""
        with self._lock:
            while self._idle:
                self._idle.pop().close()


_pool = _Pool()
_inherited: list[_Pool] = []


def _after_fork() -> None:
    """Create a new pool in a forked process: sharing pipes with the parent would mix up replies."""
    global _pool
    _inherited.append(_pool)
    _pool = _Pool()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _close_pool() -> None:
    _pool.close()


atexit.register(_close_pool)
