"""Background threads of the agent: the work stream, and the heartbeats that renew a task's lease."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gym_client.hub.backoff import Backoff, is_passing, may_pass
from gym_client.hub.transport import HubClient
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.limits import CALL_SECONDS
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_BEATS_PER_LEASE = 3

_LEAST_LEASE_SECONDS, _MOST_LEASE_SECONDS = 1.0, 3600.0
"""Bounds of a lease's duration, whatever a hub sends: heartbeats neither run in a busy loop nor stop."""

_MAX_WAITING = 64
"""Maximum number of events that wait while a task is done; a hub can send more only after they are processed."""

_PUT_SECONDS = 0.2

_STREAM_SECONDS = 3600.0
"""Maximum lifetime of a stream, so that every call ends."""


class WorkStream:
    """The hub's work events in order; a context manager."""

    def __init__(self, client: HubClient) -> None:
        self._client = client
        self._events: queue.Queue[pb.WorkEvent | GymError] = queue.Queue(_MAX_WAITING)
        self._stop = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._listen, name="work-stream", daemon=True)

    def __enter__(self) -> WorkStream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(timeout=2.0)

    def next(self, seconds: float) -> pb.WorkEvent | GymError | None:
        """Return the next event, or None if none arrives within ``seconds``.

        A ``GymError`` for which ``is_passing`` is True is only informational, because the stream reconnects. Any other
        error ends the stream.
        """
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def _put(self, event: pb.WorkEvent | GymError) -> None:
        """Queue an event; if the queue is full, wait, which stops the hub by gRPC's flow control."""
        if isinstance(event, pb.WorkEvent) and event.HasField("keep_alive") and not self._events.empty():
            return  # it only wakes a reader that has nothing to read
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                self._events.put(event, timeout=_PUT_SECONDS)
                return

    def _listen(self) -> None:
        backoff, refused, away = Backoff(), False, False
        while not self._stop.is_set():
            try:
                if away:  # the new stream may stay silent for a long time, so report now that the hub is back
                    self._client.call("Status", pb.StatusRequest())
                    self._put(pb.WorkEvent(keep_alive=pb.KeepAlive()))
                    away = False
                heard = self._listen_once(backoff)
                refused = refused and not heard
            except GymError as error:
                if self._stop.is_set():
                    return
                renewable = error.code is ErrorCode.UNAUTHENTICATED and not refused
                if renewable:
                    refused = True
                    self._client.renew_session()
                    continue
                if backoff.tolerates(error):
                    error = GymError(ErrorCode.UNAVAILABLE, error.message, error.hint)
                self._put(error)
                if not is_passing(error):
                    return
                away = True
            if not self._wait(backoff.next_seconds()):
                return

    def _listen_once(self, backoff: Backoff) -> bool:
        """Receive events until the stream ends. Return True if at least one event arrived."""
        heard = False
        try:
            with self._client.errors():
                self._call = self._client.stream("Work", pb.WorkRequest(), _STREAM_SECONDS)
                for event in self._call:
                    heard = True
                    backoff.reset()
                    self._put(event)
                    if event.WhichOneof("event") == "finished":
                        self._stop.set()
                        return True
        except GymError as error:
            if error.code is ErrorCode.DEADLINE_EXCEEDED and heard:
                return True  # the stream has reached its one-hour deadline
            raise
        return heard

    def _wait(self, seconds: float) -> bool:
        """Wait before the next attempt. Return False if the stream must end."""
        if self._stop.wait(seconds):
            return False
        try:
            self._client.check_key()
        except GymError as error:
            self._put(error)
            return False
        return True


class Lease:
    """The lease of one task, shared by the heartbeat thread and the thread that works on the task."""

    def __init__(self, message_id: str, seconds: float) -> None:
        self.message_id = message_id
        self.seconds = _bounded(seconds)
        self.lost: GymError | None = None
        self.phase, self.done, self.total = "fetch", 0, 0
        self.ended = threading.Event()
        self._beating = threading.Lock()

    def note(self, phase: str, done: int, total: int) -> None:
        """Set the progress that the next heartbeat reports."""
        self.phase, self.done, self.total = phase, done, total

    @property
    def request(self) -> pb.HeartbeatRequest:
        return pb.HeartbeatRequest(
            message_id=self.message_id, phase=self.phase, done=max(0, self.done), total=max(0, self.total)
        )

    def beat(self, client: HubClient) -> None:
        """Send one heartbeat unless the lease has ended."""
        with self._beating:
            if self.ended.is_set() or self.lost is not None:
                return
            try:
                reply = client.call("Heartbeat", self.request, seconds=min(self.seconds, CALL_SECONDS))
                self.seconds = _bounded(reply.lease_seconds) if reply.lease_seconds else self.seconds
            except GymError as error:
                # The hub may be restarting, or only this call failed; the hub keeps the lease on its disk.
                if not may_pass(error):
                    self.lost = error

    def end(self, client: HubClient) -> None:
        """Renew the lease once more and stop the heartbeats, before the result is sent.

        No heartbeat is running when this returns, so none can reach the hub after the result.
        """
        self.beat(client)
        with self._beating:
            self.ended.set()

    def touch(self, client: HubClient) -> None:
        """Renew a lease that may have expired while the hub was unreachable, before the result is sent again."""
        with contextlib.suppress(GymError):  # if the lease is lost, the hub refuses the result with a reason
            client.call("Heartbeat", self.request, seconds=min(self.seconds, CALL_SECONDS))


def _bounded(seconds: float) -> float:
    """Return the duration of a lease within its bounds; the shortest if the hub's value is not a number."""
    return min(max(_LEAST_LEASE_SECONDS, seconds), _MOST_LEASE_SECONDS)


@contextmanager
def heartbeats(client: HubClient, lease: Lease) -> Iterator[Lease]:
    """Send three heartbeats per lease duration while the block runs, or until ``lease.end``."""
    thread = threading.Thread(target=_beat, args=(client, lease), name="heartbeats", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        lease.ended.set()
        thread.join(timeout=1.0)  # a running call ends at its deadline


def _beat(client: HubClient, lease: Lease) -> None:
    while not lease.ended.is_set() and lease.lost is None:
        lease.beat(client)
        lease.ended.wait(lease.seconds / _BEATS_PER_LEASE)
