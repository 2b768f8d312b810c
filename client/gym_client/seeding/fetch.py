"""Download one object from a contributor that the hub names, within bounded time and bytes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from gym_client.hub.traffic import TokenBucket
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
"""Time for which a download may wait for a seeder, beyond that of its least rate."""
_LEAST_PORT = 1_024
_MAX_CERTIFICATE_CHARS = 4_096
_POLL_SECONDS = 0.1


def require_seeder(seeder: pb.SeederInfo, hub_host: str) -> None:
    """Check where a hub sends this machine to: never to itself or into its own network.

    Args:
        seeder: The hub's answer.
        hub_host: Address of the hub, as the contributor gave it; see ``may_connect``.

    Raises:
        GymError: ``POLICY_REFUSED``.
    """
    is_port = _LEAST_PORT <= seeder.port <= 65_535
    sizes = (
        len(seeder.certificate_pem) <= _MAX_CERTIFICATE_CHARS and len(seeder.ticket_json) <= MAX_TICKET_CHARS
    )
    if not (may_connect(seeder.host, hub_host) and is_port and sizes):
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the hub names a seeder at {plain(seeder.host, 80)} port {seeder.port}, which is not allowed",
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
) -> None:
    """Download an object into ``part`` and verify it.

    Args:
        seeder: Address, certificate and ticket.
        sha256: Digest of the object.
        size_bytes: Its size, which the download never exceeds.
        part: The file to write; deleted on failure.
        rate: Limit of the download rate.
        on_bytes: Called with the number of bytes of each chunk.
        should_stop: Checked between chunks.
        grace_seconds: See ``GRACE_SECONDS``.

    Raises:
        GymError: ``HASH_MISMATCH`` or ``TOO_LARGE`` for wrong data; ``DEADLINE_EXCEEDED`` for a slow seeder;
            ``INTERRUPTED`` after ``should_stop``; other errors of the connection or the seeder.
    """
    pem = seeder.certificate_pem.encode()
    options: list[tuple[str, Any]] = [
        *CHANNEL_OPTIONS,
        ("grpc.enable_http_proxy", 0),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.ssl_target_name_override", certificate_host(pem)),
    ]
    credentials = grpc.ssl_channel_credentials(root_certificates=pem)
    where, digest, done = host_port(seeder.host, seeder.port), hashlib.sha256(), 0
    try:
        with grpc.secure_channel(where, credentials, options=options) as channel, part.open("wb") as file:
            call = SeederStub(channel).Fetch(pb.FetchRequest(ticket_json=seeder.ticket_json))
            with _Patience(call, grace_seconds) as patience:
                for index, chunk in enumerate(patience.chunks(where)):
                    data = chunk.data
                    done += len(data)
                    if done > size_bytes or (index == 0 and chunk.size_bytes != size_bytes):
                        raise GymError(
                            ErrorCode.TOO_LARGE, f"the seeder at {where} sends another size than {size_bytes}"
                        )
                    file.write(data)
                    digest.update(data)
                    patience.done = done
                    on_bytes(len(data))
                    rate.take(len(data), should_stop)
                    if should_stop():
                        raise GymError(ErrorCode.INTERRUPTED, f"the download was stopped at byte {done}")
        if digest.hexdigest() != sha256:
            raise GymError(
                ErrorCode.HASH_MISMATCH,
                f"the seeder at {where} sent {counted(done, 'byte')} with another sha256 than {sha256[:12]}",
            )
    except BaseException:
        part.unlink(missing_ok=True)
        raise


class _Patience:
    """Cancels a call whose chunks are awaited for longer than the grace time and the least rate allow.

    Time in which this machine itself limits the rate does not count.
    """

    def __init__(self, call: Any, grace_seconds: float) -> None:
        self.done = 0
        self._call, self._grace = call, grace_seconds
        self._waited, self._since = 0.0, 0.0
        self._is_slow = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="seeder-patience", daemon=True)

    def __enter__(self) -> _Patience:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._call.cancel()
        self._thread.join()

    def chunks(self, where: str) -> Iterator[pb.DownloadChunk]:
        """Yield the messages of the call.

        Raises:
            GymError: ``DEADLINE_EXCEEDED`` for a slow call; the error of a failed one.
        """
        try:
            while True:
                with self._waiting():
                    chunk = next(self._call, None)
                if chunk is None:
                    return
                yield chunk
        except grpc.RpcError as error:
            if self._is_slow:
                raise GymError(ErrorCode.DEADLINE_EXCEEDED, f"the seeder at {where} is too slow") from error
            raise from_rpc_error(error, where) from error

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self._since = time.monotonic()
        try:
            yield
        finally:
            self._waited, self._since = self._waited + time.monotonic() - self._since, 0.0

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            since = self._since
            waited = self._waited + (time.monotonic() - since if since else 0.0)
            if waited > self._grace + self.done / LEAST_BYTES_PER_SECOND:
                self._is_slow = True
                self._call.cancel()
                return
