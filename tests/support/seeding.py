"""Contributors of a loopback hub who seed, and public objects for them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gym_client.hub.transfers import ObjectCache, download
from gym_client.hub.transport import HubClient
from gym_client.seeding.policy import SeedingPolicy
from gym_client.seeding.seeding import Seeding
from gym_server.store.database import insert_if_absent
from gym_server.store.tables import readers

from gym_fed.config.hub.seeding import SeedingTerms
from tests.support.agent_scene import Recorder
from tests.support.loopback_hub import LoopbackHub
from tests.support.wait import SECONDS

SERVES = {"listen": "127.0.0.1:0", "max_bytes_per_second": 1 << 30}
MIN_BYTES = 1000


class SeedingScene:
    """A hub that allows seeding, with one public object of 300 kB.

    Args:
        folder: An empty folder.
        config: Sections of the hub's config.
    """

    def __init__(self, folder: Path, **config: Any) -> None:
        self.folder = folder
        sections: dict[str, Any] = {"seeding": {"min_bytes": MIN_BYTES}, **config}
        self.hub = LoopbackHub(folder / "hub", **sections)
        self.data = b"soup" * 75_000
        self.sha256 = self.publish(self.data)
        self.clients: list[HubClient] = []
        self.displays: dict[str, Recorder] = {}

    def publish(self, data: bytes) -> str:
        """Store an object that every contributor may read."""
        sha256 = self.hub.fed.store.put_bytes(data)
        with self.hub.fed.database.transaction() as tx:
            insert_if_absent(tx, readers, sha256=sha256, contributor="*")
        return sha256

    def contributor(self, name: str, grace_seconds: float = 1.0, **policy: Any) -> HubClient:
        """An enrolled contributor who fetches from others, and serves them with ``SERVES`` in its policy."""
        client = self.hub.client(self.folder / name)
        display = self.displays[name] = Recorder()
        terms = SeedingTerms(min_bytes=MIN_BYTES)
        client.seeding = Seeding(client, SeedingPolicy(**policy), terms, display, grace_seconds)
        client.seeding.start()
        self.clients.append(client)
        return client

    def seeder(self, name: str, **policy: Any) -> HubClient:
        """A contributor who has the object and is listed."""
        client = self.contributor(name, **{**SERVES, **policy})
        self.fetch(client)
        self.wait_for(lambda: self.offers(client))
        return client

    def fetch(self, client: HubClient, sha256: str = "", size: int = 0) -> int:
        """Download the object as a soup; return how many of its bytes came from the hub."""
        from_hub = 0

        def count(num_bytes: int) -> None:
            nonlocal from_hub
            from_hub += num_bytes

        cache = ObjectCache(client.home.objects)
        name = sha256 or self.sha256
        path = download(client, cache, name, size or len(self.data), count=count, kind="soups")
        assert hashlib.sha256(path.read_bytes()).hexdigest() == name
        assert [file.name for file in path.parent.iterdir() if file.suffix] == []
        return from_hub

    def offers(self, client: HubClient) -> bool:
        """Return True if the hub lists a contributor with the object."""
        return any(
            seeder.name == server_of(client).fingerprint and self.sha256 in seeder.objects
            for seeder in self.tracker._seeders.values()
        )

    @property
    def tracker(self) -> Any:
        return self.hub.service._seeds

    @property
    def egress(self) -> int:
        """Bytes of objects that the hub has sent."""
        return int(self.hub.fed.traffic.counts()["download_bytes"])

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.02)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.hub.close()


def server_of(client: HubClient) -> Any:
    """The server of a contributor who seeds."""
    assert client.seeding is not None
    server = client.seeding._server
    assert server is not None
    return server
