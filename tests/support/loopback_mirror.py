"""A mirror in this process: it follows a loopback hub, and serves over gRPC with TLS on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from gym_client.cli.join import enter
from gym_client.display import Display
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from gym_client.mirror.follower import Follower
from gym_server.mirror.accounts import MirrorAccounts
from gym_server.mirror.service import MirrorService
from gym_server.rounds.soup_record import SoupRecord
from gym_server.rpc.auth_interceptor import AuthInterceptor

from gym_fed.config.hub.mirrors import MirrorConfig
from gym_fed.trust.identity.tls import create_certificate
from gym_fed.trust.mirrors.folder import MirrorFolder
from gym_fed.trust.wire.service import add_hub
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.loopback_hub import LoopbackHub
from tests.support.wait import SECONDS


class LoopbackMirror:
    """A mirror of a hub; ``take`` follows it once, and what is verified is served from then on."""

    def __init__(self, folder: Path, hub: LoopbackHub) -> None:
        self.folder = MirrorFolder(folder)
        self.follower, self.client = self.follow(hub)
        self.server = LoopbackService(folder / "keys", lambda tls: self._service(tls))
        self.config = self.server.config

    def follow(self, hub: LoopbackHub) -> tuple[Follower, HubClient]:
        """A follower of a hub with the home of this mirror."""
        home, address = Home.open(self.folder.home), Address.parse(hub.address)
        client = HubClient(home, address, establish(home, address, hub.fed.fingerprint, lambda _: False))
        enter(client, "mirror", "")
        return Follower(self.folder, client, Display(), threading.Event()), client

    def take(self) -> None:
        """Follow the hub once."""
        self.follower.take()
        self.service.refresh()

    def _service(self, tls: str) -> tuple[Any, MirrorAccounts]:
        accounts = MirrorAccounts(tls)
        self.service = MirrorService(self.folder, accounts)
        return self.service, accounts

    def close(self) -> None:
        self.client.close()
        self.server.close()


class LoopbackService:
    """Any read-only part of the hub's service with its own TLS key, on a thread."""

    def __init__(self, keys: Path, make: Any) -> None:
        keys.mkdir(parents=True, exist_ok=True)
        tls = create_certificate(keys / "tls.key", keys / "tls.crt")
        self._pair = ((keys / "tls.key").read_bytes(), (keys / "tls.crt").read_bytes())
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        service, accounts = make(tls)
        port = self._wait(self._serve(service, accounts))
        self.config = MirrorConfig(address=f"127.0.0.1:{port}", fingerprint=tls)

    async def _serve(self, service: Any, accounts: Any) -> int:
        interceptors = [AuthInterceptor(accounts)] if accounts is not None else []
        self._server = grpc.aio.server(interceptors=interceptors)
        add_hub(service, self._server)
        port = self._server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([self._pair]))
        await self._server.start()
        return port

    def close(self) -> None:
        self._wait(self._server.stop(None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)


class HostileMirror:
    """Takes every login, and answers downloads with what it is made with.

    Args:
        chunks: Data of the chunks; it ends after them.
        then: ``end``, ``silence``, or ``endless`` for the last chunk again and again.
    """

    def __init__(self, size: int, chunks: list[bytes], then: str) -> None:
        self._size, self._chunks, self._then, self.num_calls = size, chunks, then, 0

    async def Authenticate(self, request: pb.AuthenticateRequest, context: Any) -> pb.AuthenticateReply:
        return pb.AuthenticateReply(session="anything")

    async def Download(self, request: pb.DownloadRequest, context: Any) -> AsyncIterator[pb.DownloadChunk]:
        self.num_calls += 1
        yield pb.DownloadChunk(size_bytes=self._size)
        for data in self._chunks:
            yield pb.DownloadChunk(data=data)
        if self._then == "silence":
            await asyncio.sleep(SECONDS)
        while self._then == "endless":
            yield pb.DownloadChunk(data=self._chunks[-1])

    async def Ledger(self, request: pb.LedgerRequest, context: Any) -> AsyncIterator[pb.LedgerEntry]:
        self.num_calls += 1
        for sequence in range(request.from_sequence, request.from_sequence + 5):
            yield pb.LedgerEntry(
                sequence=sequence, kind="enrolled", body_json="{}", previous_hash="0" * 64, hash="1" * 64
            )


def add_version(hub: LoopbackHub, data: bytes) -> str:
    """Make a version of one soup with these bytes, which every contributor may read; give its sha256."""
    sha256 = hub.fed.store.put_bytes(data)
    integers = {"digest": "sha256:" + "cd" * 32, "sum": sha256, "sum_bytes": len(data)}
    soup = SoupRecord(sha256, len(data), {"codec": {}}, None, None, None, integers=integers)
    with hub.fed.database.transaction() as tx:
        hub.fed.round_store.take_over(tx, soup)
        hub.fed.ledger.sign_head(tx)
    return sha256
