"""The work stream: a thread that listens to the hub, reconnects with backoff, and queues what it hears."""

from __future__ import annotations

import queue
import threading
from typing import Any

from gym_client.hub.backoff import Backoff, is_passing
from gym_client.hub.transport import HubClient
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_STREAM_SECONDS = 3600.0
"""A stream is opened anew this often, so that no call is without an end."""


class WorkStream:
    """Events of the hub, in order. Use as a context manager."""

    def __init__(self, client: HubClient) -> None:
        self._client = client
        self._events: queue.SimpleQueue[pb.WorkEvent | GymError] = queue.SimpleQueue()
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
        """The next event within some seconds, or None.

        A ``GymError`` that ``is_passing`` is news (the hub is away, it is tried again); any other ends the stream.
        """
        try:
            return self._events.get(timeout=seconds)
        except queue.Empty:
            return None

    def _listen(self) -> None:
        backoff, refused, away = Backoff(), False, False
        while not self._stop.is_set():
            try:
                if (
                    away
                ):  # a new stream may be silent for long, and who waits needs to know that the hub is back
                    self._client.call("Status", pb.StatusRequest())
                    self._events.put(pb.WorkEvent(keep_alive=pb.KeepAlive()))
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
                self._events.put(error)
                if not is_passing(error):
                    return
                away = True
            if not self._wait(backoff.next_seconds()):
                return

    def _listen_once(self, backoff: Backoff) -> bool:
        """Until the stream ends; whether anything was heard."""
        heard = False
        try:
            with self._client.errors():
                self._call = self._client.stream("Work", pb.WorkRequest(), _STREAM_SECONDS)
                for event in self._call:
                    heard = True
                    backoff.reset()
                    self._events.put(event)
                    if event.WhichOneof("event") == "finished":
                        self._stop.set()
                        return True
        except GymError as error:
            if error.code is ErrorCode.DEADLINE_EXCEEDED and heard:
                return True  # the hour is over; open the next stream
            raise
        return heard

    def _wait(self, seconds: float) -> bool:
        """Wait before the next try; False when it is over."""
        if self._stop.wait(seconds):
            return False
        try:
            self._client.check_key()
        except GymError as error:
            self._events.put(error)
            return False
        return True
