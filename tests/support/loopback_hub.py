"""A hub in this process: the whole service over gRPC with TLS on loopback, without rounds and without a model.

Its base is a description, so that nothing heavy is loaded; contributors are real clients with homes of their own.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import torch
import yaml
from gym_client.cli.join import enter
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rpc.auth_interceptor import AuthInterceptor
from gym_server.rpc.health import Health
from gym_server.rpc.hub import Hub
from gym_server.rpc.streams import Wakeups
from gym_server.store.database import Database
from gym_server.store.tables import rounds
from gym_server.traffic import HubTraffic

from gym_fed.delta.base import BaseSpec
from gym_fed.delta.writer import DeltaEntry, write_delta
from gym_fed.trust.identity.manifest import UpdateManifest, lifetime, new_nonce
from gym_fed.trust.identity.variant import SignedVariant, VariantManifest
from gym_fed.trust.wire.limits import server_options
from gym_fed.trust.wire.service import add_health, add_hub
from tests.support.hub import QUICK_ENROLMENT
from tests.support.wait import SECONDS

SPEC = BaseSpec("described", "sha256:" + "ab" * 32, {"a.weight": (16, 64), "b.weight": (8, 32)})


class LoopbackHub:
    """Start it by making it; ``close`` ends it, and the folder can be opened again.

    Args:
        folder: The hub's folder; made if it is not there.
        clock: Monotonic clock of the rate limits, in seconds.
        on_call: Called with the method's name at the beginning of every call.
        config: Sections of the hub's config.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        on_call: Callable[[str], None] = lambda method: None,
        **config: Any,
    ) -> None:
        self._on_call = on_call
        self._clock = clock
        if not folder.exists():
            init_hub(folder, HubChoices("described", "loopback", "open"))
            values = {
                "listen": "127.0.0.1:0",
                "base_model": "described",
                "enrolment": {"policy": "open"},
                **config,
                "limits": {**QUICK_ENROLMENT, **config.get("limits", {})},
            }
            (folder / "gym-server.yaml").write_text(yaml.safe_dump(values))
            database = Database.open(config.get("storage", {}).get("database", "sqlite:///hub.db"), folder)
            database.set("base:described", json.dumps(SPEC.to_dict()))
            database.close()
        self.fed = Federation.open(folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.address = f"127.0.0.1:{self._wait(self._serve())}"

    async def _serve(self) -> int:
        wakeups = Wakeups()
        wakeups.bind(self._loop)
        limits = self.fed.config.limits
        options = server_options(limits.handshake_seconds, limits.connections)
        self._server = grpc.aio.server(
            interceptors=[
                AuthInterceptor(self.fed.accounts, limits, traffic=_Traffic(self._on_call), clock=self._clock)
            ],
            options=options,
        )
        self.service = Hub(self.fed, wakeups)
        add_hub(self.service, self._server)
        add_health(Health(self.fed.database), self._server)
        keys = self.fed.folder / "keys"
        pair = ((keys / "tls.key").read_bytes(), (keys / "tls.crt").read_bytes())
        port = self._server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        await self._server.start()
        return port

    def client(self, folder: Path, name: str = "") -> HubClient:
        """A contributor whose home is ``folder``, enrolled."""
        home, address = Home.open(folder), Address.parse(self.address)
        client = HubClient(home, address, establish(home, address, self.fed.fingerprint, lambda _: False))
        enter(client, name or folder.name, "")
        return client

    def close(self) -> None:
        self._wait(self._server.stop(None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.fed.close()

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(SECONDS)


class _Traffic(HubTraffic):
    def __init__(self, on_call: Callable[[str], None]) -> None:
        super().__init__()
        self._on_call = on_call

    def called(self, method: str) -> None:
        super().called(method)
        self._on_call(method)


def some_delta(folder: Path, seed: int = 0, digest: str = SPEC.digest) -> Path:
    """A small delta on the described base."""
    generator = torch.Generator().manual_seed(seed)
    spec = BaseSpec(SPEC.model_name, digest, SPEC.shapes)
    path = folder / f"{seed}.gymdelta"
    entries = [
        DeltaEntry.of(name, torch.randn(shape, generator=generator), "dense", dtype="float32")
        for name, shape in spec.shapes.items()
    ]
    write_delta(path, entries, spec)
    return path


def manifest_of(path: Path, name: str = "mine", **changes: Any) -> VariantManifest:
    """A manifest of a delta on the described base; ``sign_variant`` puts the owner in."""
    from gym_fed.core.files import file_sha256

    said: dict[str, Any] = {
        "variant": name,
        "owner": "c" + "0" * 32,
        "base_model": SPEC.model_name,
        "base_digest": SPEC.digest,
        "delta_sha256": file_sha256(path),
        "size_bytes": path.stat().st_size,
    }
    return VariantManifest(**{**said, **changes})


def task_of_open_round(hub: LoopbackHub, session: str, number: int = 1) -> str:
    """Open a round that collects updates, and lease its task to the node of a session; gives the task's id."""
    node = hub.fed.accounts.session(session).node_id
    task = give_task(hub, node, number)
    hub.fed.queue.lease(node)
    return task


def give_task(hub: LoopbackHub, node: int, number: int = 1, content: bytes = b"") -> str:
    """Open a round that collects updates, and queue its task for a node; gives the task's id."""
    spec = json.dumps({"version_digest": hub.fed.base.digest})
    now = hub.fed.clock.now()
    row = {"server_round": number, "state": "collecting", "base_height": 0, "opened_at": now}
    with hub.fed.database.transaction() as tx:
        tx.execute(rounds.insert().values(**row, reason="", spec=spec))
    return hub.fed.queue.push(node, str(number), "train", now, 3600, content)


def update_of(
    hub: LoopbackHub, contributor: str, task: str, delta: bytes, number: int = 1, **changes: Any
) -> UpdateManifest:
    """The manifest of an update for ``task_of_open_round``."""
    issued, expires = lifetime(hub.fed.clock.now())
    fields: dict[str, Any] = {
        "contributor": contributor,
        "server": hub.fed.server,
        "task": task,
        "server_round": number,
        "base_digest": hub.fed.base.digest,
        "delta_sha256": hashlib.sha256(delta).hexdigest(),
        "delta_bytes": len(delta),
        "nonce": new_nonce(),
        "issued_at_seconds": issued,
        "expires_at_seconds": expires,
        "num_examples": 1,
    }
    return UpdateManifest(**{**fields, **changes})


def forged(signed: SignedVariant) -> SignedVariant:
    """The same with a signature of zeros."""
    return SignedVariant(signed.manifest, signed.public_key, bytes(64))
