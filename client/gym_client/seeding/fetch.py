"""Download one object from a contributor that the hub has named, with bounded time and size."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gym_client.hub.traffic import DownloadPace, TokenBucket
from gym_client.hub.transport import HubClient
from gym_client.seeding.policy import LEAST_BYTES_PER_SECOND
from gym_fed.core.addresses import host_port, may_connect
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain
from gym_fed.trust.identity.ticket import MAX_TICKET_CHARS
from gym_fed.trust.identity.tls import certificate_host
from gym_fed.trust.wire.errors import from_rpc_error
from gym_fed.trust.wire.limits import CHANNEL_OPTIONS
from gym_fed.trust.wire.service import SeederStub
from gym_fed.trust.wire.v1 import hub_pb2 as pb

GRACE_SECONDS = 10.0
"""Maximum seconds of silence of a seeder, and maximum delay of a whole download relative to the minimum rate."""
_LEAST_PORT = 1_024
_MAX_CERTIFICATE_CHARS = 4_096
_POLL_SECONDS = 0.1


def require_seeder(seeder: pb.SeederInfo, hub_host: str) -> None:
    """Check the address of a seeder, which must not be this machine or in its own network.

    Args:
        seeder: The seeder that the hub has named.
        hub_host: Address of the hub, as given by the contributor; see ``may_connect``.

    Raises:
        GymError: ``POLICY_REFUSED`` for a forbidden address.
    """
    is_port = _LEAST_PORT <= seeder.port <= 65_535
    sizes = (
        len(seeder.certificate_pem) <= _MAX_CERTIFICATE_CHARS and len(seeder.ticket_json) <= MAX_TICKET_CHARS
    )
    if not (may_connect(seeder.host, hub_host) and is_port and sizes):
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the hub returned a seeder at {plain(seeder.host, 80)} port {seeder.port}, which is not allowed",
        )


def fetch_from(
    seeder: pb.SeederInfo,
    sha256: str,
    size_bytes: int,
    part: Path,
    rate: TokenBucket,
    on_bytes: Callable[[int], None],
    should_stop: Callable[[], bool],
    grace_seconds: float = GRACE_SECONDS,
    most_seconds: float = math.inf,
) -> None:
    """Download an object into ``part`` and verify it.

    Args:
        seeder: Address, certificate and ticket of the seeder.
        sha256: Digest of the object.
        size_bytes: Size of the object; the download never exceeds it.
        part: The file to write; deleted on failure.
        rate: Limit of the download rate.
        on_bytes: Called with the number of bytes of each chunk.
        should_stop: Checked between chunks and while waiting for one.
        grace_seconds: See ``GRACE_SECONDS``.
        most_seconds: Time limit of the download in seconds.

    Raises:
        GymError: ``INTERRUPTED`` after ``should_stop``; ``BUSY`` for a seeder that could not be reached, refused the
            download or needs longer than ``most_seconds``. All other errors are the seeder's fault: ``HASH_MISMATCH``
            or ``TOO_LARGE`` for wrong data, ``DEADLINE_EXCEEDED`` if it is silent or slow, ``UNAVAILABLE`` if the
            download was cut off.
    """
    target = FetchTarget(seeder.host, seeder.port, seeder.certificate_pem, "the seeder")

    def begin(channel: grpc.Channel) -> Any:
        return SeederStub(channel).Fetch(pb.FetchRequest(ticket_json=seeder.ticket_json))

    limits = FetchLimits(rate, on_bytes, should_stop, grace_seconds, most_seconds)
    fetch_bounded(target, begin, sha256, size_bytes, part, limits)


@dataclass(frozen=True)
class FetchTarget:
    """A machine that serves objects: its address, port, required certificate, and role for error messages."""

    host: str
    port: int
    certificate_pem: str
    role: str

    def __str__(self) -> str:
        return f"{self.role} at {host_port(self.host, self.port)}"


@dataclass(frozen=True)
class FetchLimits:
    """The limits of a download; see ``fetch_from``."""

    rate: TokenBucket
    on_bytes: Callable[[int], None]
    should_stop: Callable[[], bool]
    grace_seconds: float = GRACE_SECONDS
    most_seconds: float = math.inf


def fetch_bounded(
    target: FetchTarget,
    begin: Callable[[grpc.Channel], Any],
    sha256: str,
    size_bytes: int,
    part: Path,
    limits: FetchLimits,
) -> None:
    """Download an object from an untrusted machine, and verify it.

    Args:
        target: The machine.
        begin: Starts the call, which streams ``DownloadChunk`` messages.
        sha256: Digest of the object.
        size_bytes: Size of the object; the download never exceeds it.
        part: The file to write; deleted on failure.
        limits: Limits of rate and time.

    Raises:
        GymError: Errors of ``fetch_from``.
    """
    digest = hashlib.sha256()
    try:
        with begin_channel(target) as channel, part.open("wb") as file:
            call = _BoundedCall(channel, begin, str(target), limits)
            for data in call.chunks(size_bytes):
                file.write(data)
                digest.update(data)
                limits.on_bytes(len(data))
                limits.rate.take(len(data), limits.should_stop)
        if digest.hexdigest() != sha256:
            raise GymError(
                ErrorCode.HASH_MISMATCH,
                f"{target} sent {counted(call.done, 'byte')} whose sha256 is not {sha256[:12]}",
            )
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def begin_channel(target: FetchTarget) -> grpc.Channel:
    """Open a direct channel that trusts only the certificate of the target."""
    pem = target.certificate_pem.encode()
    options: list[tuple[str, Any]] = [
        *CHANNEL_OPTIONS,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.ssl_target_name_override", certificate_host(pem)),
    ]
    credentials = grpc.ssl_channel_credentials(root_certificates=pem)
    return grpc.secure_channel(host_port(target.host, target.port), credentials, options=options)


class _BoundedCall:
    """A download call whose messages are read on a separate thread, so that waiting for one can end at any time.

    Time in which this machine itself limits the rate does not count as waiting for the seeder.
    """

    def __init__(
        self, channel: grpc.Channel, begin: Callable[[grpc.Channel], Any], where: str, limits: FetchLimits
    ) -> None:
        self.done = 0
        self._where, self._should_stop, self._grace = where, limits.should_stop, limits.grace_seconds
        self._most_seconds, self._started, self._waited = limits.most_seconds, time.monotonic(), 0.0
        self._is_connected = self._has_begun = False
        channel.subscribe(self._see)
        self._call = begin(channel)

    def chunks(self, size_bytes: int) -> Iterator[bytes]:
        """Yield the chunks of an object.

        Raises:
            GymError: Errors of ``fetch_from``.
        """
        with ThreadPoolExecutor(1, "seeder-download") as thread:
            try:
                while self.done < size_bytes:
                    if (chunk := self._next(thread)) is None:
                        raise self._ended("the download ended early")
                    data = chunk.data
                    self.done += len(data)
                    if self.done > size_bytes or not (self._has_begun or chunk.size_bytes == size_bytes):
                        text = f"{self._where} sent an object of a size other than {size_bytes}"
                        raise GymError(ErrorCode.TOO_LARGE, text)
                    self._has_begun = True
                    yield data
                    self._check(0.0)
            finally:
                self._call.cancel()

    def _next(self, thread: ThreadPoolExecutor) -> pb.DownloadChunk | None:
        began, message = time.monotonic(), thread.submit(next, self._call, None)
        try:
            while True:
                try:
                    chunk: pb.DownloadChunk | None = message.result(_POLL_SECONDS)
                    return chunk
                except TimeoutError:
                    self._check(time.monotonic() - began)
        except grpc.RpcError as error:
            raise self._ended(from_rpc_error(error, self._where).message) from error
        finally:
            self._waited += time.monotonic() - began

    def _ended(self, reason: str) -> GymError:
        """Create the error for a call that the seeder ended; the seeder's own message is not used."""
        code = ErrorCode.UNAVAILABLE if self._has_begun else ErrorCode.BUSY
        return GymError(code, f"{self._where}: {plain(reason, 200)}")

    def _check(self, waiting: float) -> None:
        if self._should_stop():
            raise GymError(ErrorCode.INTERRUPTED, f"the download was stopped at byte {self.done}")
        allowed = self._grace + self.done / LEAST_BYTES_PER_SECOND
        if waiting > self._grace or self._waited + waiting > allowed:
            if not self._is_connected:
                raise GymError(ErrorCode.BUSY, f"{self._where} cannot be reached")
            raise GymError(ErrorCode.DEADLINE_EXCEEDED, f"{self._where} is too slow")
        if time.monotonic() - self._started > self._most_seconds:
            raise GymError(ErrorCode.BUSY, f"{self._where} takes longer than the hub would")

    def _see(self, state: grpc.ChannelConnectivity) -> None:
        self._is_connected = self._is_connected or state is grpc.ChannelConnectivity.READY


def time_limit(client: HubClient, size_bytes: int, grace_seconds: float = GRACE_SECONDS) -> float:
    """Return the time limit in seconds for all downloads of an object from other machines.

    It is eight times the hub's expected time, if the hub's bandwidth is known. Other machines are not expected
    to send more than 256 KiB/s; a rate below the minimum is only accepted if this machine's own connection is slow.
    """
    pace = DownloadPace(client.home, client.rates.down.bytes_per_second).bandwidth()
    hubs = LEAST_BYTES_PER_SECOND if pace is None else pace.bytes_per_second
    least = min(max(hubs / 8, min(hubs, LEAST_BYTES_PER_SECOND)), 4 * LEAST_BYTES_PER_SECOND)
    return 6 * grace_seconds + size_bytes / least
