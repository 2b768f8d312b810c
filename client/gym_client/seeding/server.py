"""A server that sends objects to contributors who present a ticket from the hub.

A new TLS key is generated for every run. Before its ticket is verified, a caller learns neither which objects are
stored here nor who owns the machine. A ticket is valid for one download.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import grpc
from cryptography.hazmat.primitives.asymmetric import ec

from gym_client.hub.traffic import TokenBucket
from gym_client.seeding.policy import LEAST_BYTES_PER_SECOND, SeedingPolicy
from gym_client.seeding.store import Seed, SeedingTotals, SeedStore
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import plain_pem
from gym_fed.trust.identity.ticket import SeedTicket
from gym_fed.trust.identity.tls import fingerprint, self_signed
from gym_fed.trust.wire.errors import to_status
from gym_fed.trust.wire.limits import server_options
from gym_fed.trust.wire.service import add_seeder
from gym_fed.trust.wire.v1 import hub_pb2 as pb

log = logging.getLogger("gym_client")

_CHUNK_BYTES = 256 << 10
_HANDSHAKE_SECONDS = 5.0
_CONNECTIONS = 64
_WRITE_SECONDS = 30.0
_START_SECONDS = 10.0
_STOP_SECONDS = 2.0
_IDLE_SECONDS = 10
"""Seconds after which a connection without a download is closed, since anybody can open one."""
_SPARE_THREADS = 2
"""Number of additional threads, which verify tickets while all downloads wait for their rate limits."""


class SeederServer:
    """Serves the objects of a store on a separate thread.

    Args:
        policy: Address and limits of the server.
        slots: Returns the number of downloads that may be served concurrently.
        store: The objects to serve.
        totals: Counts the served bytes and enforces the daily limit.
        upload_rate: The policy's rate limit for all uploads.
        ticket: Verifies a ticket for the seeder with a given fingerprint: ``ticket(text, fingerprint)``.
        now: Returns the hub's time in Unix seconds.
    """

    def __init__(
        self,
        policy: SeedingPolicy,
        slots: Callable[[], int],
        store: SeedStore,
        totals: SeedingTotals,
        upload_rate: TokenBucket,
        ticket: Callable[[str, str], SeedTicket],
        now: Callable[[], float],
    ) -> None:
        key = plain_pem(ec.generate_private_key(ec.SECP256R1()))
        self._key_pem, self._certificate = key, self_signed(key)
        self.fingerprint = fingerprint(self._certificate)
        self.port = 0
        self.rate = TokenBucket(policy.max_bytes_per_second)
        self._policy, self._slots, self._store, self._totals = policy, slots, store, totals
        self._upload_rate, self._ticket, self._now = upload_rate, ticket, now
        self._used: dict[str, int] = {}  # nonces of used tickets, with their expiry
        self._busy, self.is_paused, self._ends_downloads = 0, False, False
        self._closed = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(policy.slots() + _SPARE_THREADS, "seeder")
        self._loop.set_default_executor(self._threads)
        self._thread = threading.Thread(target=self._loop.run_forever, name="seeder", daemon=True)
        self._server: Any = None

    @property
    def certificate_pem(self) -> str:
        """The certificate that downloaders accept as the only one."""
        return self._certificate.decode("ascii")

    def start(self) -> None:
        """Start to listen.

        Raises:
            GymError: ``ADDRESS_IN_USE`` if the address cannot be used.
        """
        self._thread.start()
        try:
            self.port = self._wait(self._serve())
        except (RuntimeError, TimeoutError) as error:
            self.close()
            raise GymError(
                ErrorCode.ADDRESS_IN_USE,
                f"seeding: cannot listen on {self._policy.listen}",
                "change seeding.listen in policy.yaml, or stop the program that uses the port",
            ) from error

    def pause(self, paused: bool) -> None:
        """Refuse new downloads if ``paused``, otherwise serve again."""
        self.is_paused = paused
        if not paused:
            self._ends_downloads = False

    def end_downloads(self) -> None:
        """End the running downloads if the server is paused."""
        self._ends_downloads = self.is_paused

    def close(self) -> None:
        """End all downloads and stop listening."""
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            if self._server is not None:
                self._wait(self._server.stop(None), _STOP_SECONDS)
        except TimeoutError:
            log.info("the seeding server did not stop in time")
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_SECONDS)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if not self._thread.is_alive():
            self._loop.close()

    async def _serve(self) -> int:
        options = server_options(_HANDSHAKE_SECONDS, _CONNECTIONS, _IDLE_SECONDS)
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_CONNECTIONS)
        add_seeder(self, self._server)
        credentials = grpc.ssl_server_credentials([(self._key_pem, self._certificate)])
        port = int(self._server.add_secure_port(str(self._policy.listen), credentials))
        await self._server.start()
        return port

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> None:
        """Send one object to the caller."""
        try:
            ticket = await asyncio.to_thread(self._ticket, request.ticket_json, self.fingerprint)
            seed, file, day = self._admit(ticket)
        except GymError as error:
            await _abort(context, error)
            return
        self._busy += 1
        sent = 0
        try:
            async with asyncio.timeout(_WRITE_SECONDS + seed.size_bytes / LEAST_BYTES_PER_SECOND):
                await context.write(pb.DownloadChunk(size_bytes=seed.size_bytes))
                async for num_bytes in self._send(file, context):
                    sent += num_bytes
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the download is too slow")
        finally:
            self._busy -= 1
            self._totals.release(max(0, seed.size_bytes - sent), day)
            file.close()

    def _admit(self, ticket: SeedTicket) -> tuple[Seed, BinaryIO, str]:
        """Use up a ticket. Return its object, the open file, and the day whose limit the bytes count against.

        The open file stays readable even if the object is deleted afterwards.

        Raises:
            GymError: ``PERMISSION_DENIED`` for a used ticket; ``NOT_FOUND``; ``BUSY`` beyond the policy's limits.
        """
        now = self._now()
        self._used = {nonce: until for nonce, until in self._used.items() if until >= now}
        if ticket.nonce in self._used:
            raise GymError(ErrorCode.PERMISSION_DENIED, "no valid ticket", "request one from the hub")
        self._used[ticket.nonce] = ticket.expires_at_seconds
        seed = self._store.find(ticket.sha256)
        if seed is None:
            raise _not_served()
        if self.is_paused or self._busy >= self._slots():
            raise _busy()
        try:
            file = seed.path.open("rb")
        except OSError:
            raise _not_served() from None
        if not (day := self._totals.reserve(seed.size_bytes)):
            file.close()
            raise _busy()
        return seed, file, day

    async def _send(self, file: BinaryIO, context: Any) -> AsyncIterator[int]:
        """Send a file; yield the number of bytes of each chunk before it is sent."""
        while data := await asyncio.to_thread(file.read, self.rate.chunk(_CHUNK_BYTES)):
            if self._ends_downloads:
                await _abort(context, _busy())
            self._totals.serve(len(data))
            yield len(data)
            async with asyncio.timeout(_WRITE_SECONDS):
                await context.write(pb.DownloadChunk(data=data))
            await asyncio.to_thread(self._pay, len(data))

    def _pay(self, num_bytes: int) -> None:
        """Wait until the rate limits allow ``num_bytes``."""
        self.rate.take(num_bytes, self._closed.is_set)
        self._upload_rate.take(num_bytes, self._closed.is_set)

    def _wait(self, work: Any, seconds: float = _START_SECONDS) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)


async def _abort(context: Any, error: GymError) -> None:
    status, details, trailer = to_status(error)
    await context.abort(status, details, trailer)


def _busy() -> GymError:
    return GymError(
        ErrorCode.BUSY, "this contributor serves no more downloads now", "use another seeder, or the hub"
    )


def _not_served() -> GymError:
    return GymError(ErrorCode.NOT_FOUND, "this contributor does not serve the object")
