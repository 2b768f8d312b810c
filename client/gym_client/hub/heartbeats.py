"""Heartbeats: a thread that keeps the lease of the task under way and notes when it is lost."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gym_client.hub.backoff import is_passing
from gym_client.hub.transport import HubClient
from gym_fed.core.errors import GymError
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_BEATS_PER_LEASE = 3


class Lease:
    """One task's lease; the beating thread and the working one share it."""

    def __init__(self, message_id: str, seconds: float) -> None:
        self.message_id = message_id
        self.seconds = seconds
        self.lost: GymError | None = None
        self.phase, self.done, self.total = "fetch", 0, 0
        self.ended = threading.Event()
        self._beating = threading.Lock()

    def note(self, phase: str, done: int, total: int) -> None:
        """What the next heartbeat reports."""
        self.phase, self.done, self.total = phase, done, total

    @property
    def request(self) -> pb.HeartbeatRequest:
        return pb.HeartbeatRequest(
            message_id=self.message_id, phase=self.phase, done=max(0, self.done), total=max(0, self.total)
        )

    def beat(self, client: HubClient) -> None:
        """One heartbeat, unless the lease has ended; one at a time."""
        with self._beating:
            if self.ended.is_set() or self.lost is not None:
                return
            try:
                reply = client.call("Heartbeat", self.request, seconds=max(1.0, self.seconds))
                self.seconds = reply.lease_seconds or self.seconds
            except GymError as error:
                if not is_passing(error):  # the hub may be restarting; the lease is on its disk
                    self.lost = error

    def end(self, client: HubClient) -> None:
        """The task is about to be answered: prolong the lease once more, and beat no further.

        When this returns no heartbeat is under way, so that none reaches the hub after the answer.
        """
        self.beat(client)
        with self._beating:
            self.ended.set()

    def touch(self, client: HubClient) -> None:
        """Before the answer is sent again: prolong a lease that may have run out while the hub was away."""
        with contextlib.suppress(GymError):  # the answer's own refusal reports the state of the lease
            client.call("Heartbeat", self.request, seconds=max(1.0, self.seconds))


@contextmanager
def heartbeats(client: HubClient, lease: Lease) -> Iterator[Lease]:
    """Beat at once, and then three times a lease, while the block runs or until ``lease.end``."""
    thread = threading.Thread(target=_beat, args=(client, lease), name="heartbeats", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        lease.ended.set()
        thread.join(timeout=1.0)  # a call under way ends by its deadline; nobody waits for it


def _beat(client: HubClient, lease: Lease) -> None:
    while not lease.ended.is_set() and lease.lost is None:
        lease.beat(client)
        lease.ended.wait(lease.seconds / _BEATS_PER_LEASE)
