"""The floods, each in a process of its own: ``_flood_kinds.py KIND PORT FINGERPRINT HOME``."""

from __future__ import annotations

import asyncio
import secrets
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from _flood_hub import FLOOD_HOST, connected, new_channel
from gym_client.cli.join import enter
from gym_client.identity.home import Home

from gym_fed.core.errors import GymError
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.wire.limits import SESSION_KEY
from gym_fed.trust.wire.service import HubStub
from gym_fed.trust.wire.v1 import hub_pb2 as pb

FLOODS = ("instances", "work streams", "mute uploads", "mute TCP", "calls", "enrolments", "status")


class Flood:
    """One flood, in a process of its own: prints ``ready``, then goes on until it is killed."""

    def __init__(self, port: int, fingerprint: str, folder: Path) -> None:
        self.address = f"{FLOOD_HOST}:{port}"
        self.home = Home.open(folder)
        self.client = connected(port, fingerprint, self.home, FLOOD_HOST)
        self.pem = self.client.pin.certificate_pem

    def run(self, kind: str) -> None:
        if kind not in ("mute TCP", "status", "enrolments"):
            enter(self.client, "flood", "")
        asyncio.run(getattr(self, kind.replace(" ", "_"))())

    def sessions(self, number: int) -> list[str]:
        """Sessions of as many installations."""
        found = []
        for index in range(number):
            self.client._instance = f"instance{index:08d}"
            self.client.renew_session()
            try:
                self.client.authenticate()
                found.append(self.client._session)
            except GymError:
                if not found:
                    raise
                time.sleep(0.01)
        return found

    async def instances(self) -> None:
        tokens = await asyncio.to_thread(self.sessions, 300)
        await self._streams((tokens * 300)[:300], 300)

    async def work_streams(self) -> None:
        await self._streams(self.sessions(1) * 1000, 1000)

    async def _streams(self, tokens: list[str], number: int) -> None:
        stubs = self._stubs(max(1, number // 25))

        async def listen(index: int) -> None:
            while True:
                with suppress(grpc.RpcError):
                    metadata = [(SESSION_KEY, tokens[index])]
                    async for _ in stubs[index % len(stubs)].Work(pb.WorkRequest(), metadata=metadata):
                        pass  # a task, which is never answered
                await asyncio.sleep(0.5)

        await self._together([listen(index) for index in range(number)])

    async def mute_uploads(self) -> None:
        token, stubs = self.sessions(1)[0], self._stubs(40)

        async def upload(index: int) -> None:
            while True:
                with suppress(grpc.RpcError):
                    call = stubs[index % len(stubs)].Upload(metadata=[(SESSION_KEY, token)])
                    await call.wait_for_connection()
                    await call  # nothing is sent
                await asyncio.sleep(0.5)

        await self._together([upload(index) for index in range(1000)])

    async def mute_TCP(self) -> None:
        host, _, port = self.address.rpartition(":")

        async def connect() -> None:
            while True:
                with suppress(OSError):
                    reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
                    await reader.read()
                    writer.close()
                await asyncio.sleep(0.2)

        await self._together([connect() for _ in range(1100)])

    async def calls(self) -> None:
        token = self.sessions(1)[0]
        await self._closed_loop(
            lambda stub: stub.Account(pb.AccountRequest(), metadata=[(SESSION_KEY, token)])
        )

    async def status(self) -> None:
        await self._closed_loop(lambda stub: stub.Status(pb.StatusRequest()))

    async def enrolments(self) -> None:
        self.client.status()  # pins the hub's id
        server = self.client.pin.server

        def enrol(stub: Any) -> Any:
            key, name = SigningKey.generate(), secrets.token_hex(8)
            claim: dict[str, object] = {"enrol": name, "invite": "", "server": server}
            with suppress(ImportError):
                from gym_fed.trust.identity.login import enrolment_claim

                claim = enrolment_claim(name, "", server, self.client.pin.fingerprint)
            request = pb.EnrolRequest(public_key=key.public_key, name=name, signature=key.sign(claim))
            if hasattr(request, "protocol"):
                from gym_fed.trust.wire.limits import PROTOCOL

                request.protocol = PROTOCOL
            return stub.Enrol(request)

        await self._closed_loop(enrol)

    async def _closed_loop(self, call: Callable[[Any], Any]) -> None:
        stubs = self._stubs(20)

        async def again(index: int) -> None:
            while True:
                with suppress(grpc.RpcError):
                    await call(stubs[index % len(stubs)])

        await self._together([again(index) for index in range(400)])

    def _stubs(self, number: int) -> list[Any]:
        return [HubStub(new_channel(grpc.aio, self.address, self.pem)) for _ in range(number)]

    async def _together(self, work: list[Any]) -> None:
        tasks = [asyncio.ensure_future(one) for one in work]
        print("ready", flush=True)
        await asyncio.gather(*tasks)


if __name__ == "__main__":
    given_kind, given_port, given_fingerprint, given_home = sys.argv[1:]
    Flood(int(given_port), given_fingerprint, Path(given_home)).run(given_kind)
