"""Bytes that a hub sends to 32 contributors, with and without seeding, and the time until everybody has everything.

    python benchmarks/seeding.py [--seeds 11 12 13] [--contributors 32] [--quick] [--json] [--plot FILE]

A real hub and real contributors run in one process, over gRPC with TLS on loopback; nothing is trained. Contributors
arrive at random within some seconds, in an order and at times that depend on the seed, and fetch a base of 6 MB. Then
two soups of 2 MB are published, and all contributors fetch each of them at the same time. Uplinks are limited to 16
MB/s for the hub and 2 MB/s for each contributor. The peer is the same hub without seeding. In the third column, half of
the contributors serve and the others only fetch.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import yaml
from _report import Report, options
from gym_client.base.fetching import fetch_files, read_listing
from gym_client.cli.join import enter
from gym_client.display import Display
from gym_client.hub.transfers import ObjectCache, download
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from gym_client.seeding.policy import SeedingPolicy
from gym_client.seeding.seeding import Seeding
from gym_server.cli.setup import HubChoices, init_hub
from gym_server.federation import Federation
from gym_server.rpc.auth_interceptor import AuthInterceptor
from gym_server.rpc.hub import Hub
from gym_server.rpc.streams import Wakeups
from gym_server.store.database import insert_if_absent
from gym_server.store.tables import readers

from gym_fed.config.hub.seeding import SeedingConfig, SeedingTerms
from gym_fed.trust.wire.limits import server_options
from gym_fed.trust.wire.service import add_hub
from gym_fed.trust.wire.v1 import hub_pb2 as pb

CONTRIBUTORS, SOUPS, SOUP_BYTES = 32, 2, 2_000_000
HUB_BYTES_PER_SECOND, SEEDER_BYTES_PER_SECOND = 16_000_000, 2_000_000
ARRIVAL_SECONDS = 10.0
START_SECONDS = 60
AIM = 0.25


@dataclass(frozen=True)
class Run:
    """The result of one run: bytes sent by the hub and by contributors, and seconds until all had everything."""

    hub_bytes: int
    peer_bytes: int
    seconds: float


class LimitedHub(Hub):
    """A hub with a limited uplink for objects."""

    free_at = 0.0

    async def Download(self, request: pb.DownloadRequest, context: Any) -> AsyncIterator[pb.DownloadChunk]:
        async for chunk in super().Download(request, context):
            yield chunk
            self.free_at = max(self.free_at, time.monotonic()) + len(chunk.data) / HUB_BYTES_PER_SECOND
            await asyncio.sleep(self.free_at - time.monotonic())


class Serving:
    """A hub that listens on its own thread."""

    def __init__(self, folder: Path, base: Path, seeding: bool) -> None:
        init_hub(folder, HubChoices(str(base), "benchmark", "open"))
        config = {
            "listen": "127.0.0.1:0",
            "base_model": str(base),
            "serve_base": True,
            "enrolment": {"policy": "open"},
            "limits": {"enrolment_work_bits": 0, "enrolments_per_minute": 60_000, "calls_per_second": 1e5},
            "seeding": SeedingConfig().model_dump() if seeding else None,
        }
        (folder / "gym-server.yaml").write_text(yaml.safe_dump(config))
        self.fed = Federation.open(folder)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.address = Address("127.0.0.1", self._wait(self._serve()))

    async def _serve(self) -> int:
        wakeups = Wakeups()
        wakeups.bind(self._loop)
        limits = self.fed.config.limits
        interceptor = AuthInterceptor(self.fed.accounts, limits, traffic=self.fed.traffic)
        self._server = grpc.aio.server(interceptors=[interceptor], options=server_options(30, 1000))
        add_hub(LimitedHub(self.fed, wakeups), self._server)
        keys = self.fed.folder / "keys"
        pair = ((keys / "tls.key").read_bytes(), (keys / "tls.crt").read_bytes())
        port = self._server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
        await self._server.start()
        return int(port)

    def publish(self, data: bytes) -> str:
        """Store an object that every contributor may read, as a round's commit does with its soup."""
        sha256 = self.fed.store.put_bytes(data)
        with self.fed.database.transaction() as tx:
            insert_if_absent(tx, readers, sha256=sha256, contributor="*")
        return sha256

    def client(self, folder: Path) -> HubClient:
        home = Home.open(folder)
        pin = establish(home, self.address, self.fed.fingerprint, lambda _: False)
        client = HubClient(home, self.address, pin)
        enter(client, folder.name, "")
        return client

    def close(self) -> None:
        self._wait(self._server.stop(None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self.fed.close()

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(START_SECONDS)


@contextmanager
def hub_with(
    count: int, serving: int, base: Path
) -> Iterator[tuple[Serving, list[HubClient], list[Seeding]]]:
    """Yield a hub and its enrolled contributors, of whom the first ``serving`` serve others; 0 disables seeding."""
    with tempfile.TemporaryDirectory(prefix="gym-seeding-") as name:
        hub = Serving(Path(name) / "hub", base, serving > 0)
        clients = [hub.client(Path(name) / f"c{number}") for number in range(count)]
        seeders: list[Seeding] = []
        try:
            for number, client in enumerate(clients if serving else []):
                listen = "127.0.0.1:0" if number < serving else None
                policy = SeedingPolicy(listen=listen, max_bytes_per_second=SEEDER_BYTES_PER_SECOND)
                client.seeding = Seeding(client, policy, SeedingTerms.of(SeedingConfig()), Display())
                seeders.append(client.seeding)
            yield hub, clients, seeders
        finally:
            for client in clients:
                client.close()
            hub.close()


def measure(count: int, serving: int, base: Path, seed: int, arrival_seconds: float) -> Run:
    """Let all contributors arrive and fetch the base, and then every soup."""
    draw = random.Random(seed)
    arrivals = [draw.uniform(0, arrival_seconds) for _ in range(count)]
    draw.shuffle(arrivals)
    with hub_with(count, serving, base) as (hub, clients, seeders), ThreadPoolExecutor(count) as pool:
        began = time.monotonic()

        def arrive(client: HubClient, seconds: float) -> None:
            time.sleep(seconds)
            if client.seeding is not None:
                client.seeding.start()
            files = read_listing(client).files
            folder = client.home.folder / "base"
            folder.mkdir()
            fetch_files(
                client, folder, files, lambda action: action(), lambda *_: None, lambda: False, lambda _: None
            )

        list(pool.map(arrive, clients, arrivals))
        seconds = time.monotonic() - began
        for _ in range(SOUPS):
            sha256, began = hub.publish(os.urandom(SOUP_BYTES)), time.monotonic()

            def take(client: HubClient, sha256: str = sha256) -> None:
                download(client, ObjectCache(client.home.objects), sha256, SOUP_BYTES, kind="soups")

            list(pool.map(take, clients))
            seconds += time.monotonic() - began
        sent = sum(seeding.totals.now.served for seeding in seeders)
        return Run(hub.fed.traffic.counts()["download_bytes"], sent, seconds)


def random_base(folder: Path) -> Path:
    """Write a Llama with 1.5 million random weights; return its folder."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2500, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def main() -> None:
    parser = options(__doc__)
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[11, 12, 13], help="seeds of the arrivals (11 12 13)"
    )
    parser.add_argument("--contributors", type=int, default=CONTRIBUTORS, help=f"({CONTRIBUTORS})")
    arguments = parser.parse_args()
    seeds = arguments.seeds[:1] if arguments.quick else arguments.seeds
    count, window = arguments.contributors, 2.0 if arguments.quick else ARRIVAL_SECONDS
    report = Report("seeding", peer="hub alone")
    with tempfile.TemporaryDirectory(prefix="gym-seeding-base-") as name:
        base = random_base(Path(name))
        shares: list[float] = []
        for seed in seeds:
            alone, *others = (measure(count, n, base, seed, window) for n in (0, count, count // 2))
            shares.append(others[0].hub_bytes / alone.hub_bytes)
            for who, run in zip(("all", "half"), others, strict=True):
                sizes = run.hub_bytes / 1e6, alone.hub_bytes / 1e6
                report.compare(f"seed {seed}, {who} serve: hub sends", *sizes, unit="MB")
                report.compare(
                    f"seed {seed}, {who} serve: contributors send", run.peer_bytes / 1e6, unit="MB"
                )
                report.compare(f"seed {seed}, {who} serve: time", run.seconds, alone.seconds, unit="s")
        report.figure("mean share of the hub's bytes", statistics.fmean(shares))
        for seed, share in zip(seeds, shares, strict=True):
            report.aim(f"seed {seed}: share of the hub's bytes with seeding", share, AIM, better="lower")
    report.finish(arguments)


if __name__ == "__main__":
    main()
