"""Floods against a hub that is a real process: who floods is held to a share, and everybody else is served."""

from __future__ import annotations

import socket
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from gym_client.cli.join import enter
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish

from gym_fed.core.errors import GymError
from gym_fed.trust.identity.tls import TLS_NAME
from gym_fed.trust.wire.limits import CHANNEL_OPTIONS, SESSION_KEY
from gym_fed.trust.wire.service import HubStub
from gym_fed.trust.wire.v1 import hub_pb2 as pb
from tests.support.hub import HubProcess
from tests.support.quick import quick
from tests.support.wait import SECONDS

FLOOD_HOST = "[::1]"
"""Another address than the honest ones' 127.0.0.1."""
GROWTH_BYTES = 100 << 20
LIMITS = {
    "handshake_seconds": 2,
    "idle_upload_seconds": 1,
    "connections_per_address": 64,
    "calls_per_second": 10,
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[HubProcess]:
    folder = tmp_path_factory.mktemp("floods") / "hub"
    config = {"limits": {**LIMITS, "enrolment_work_bits": 4}, "rounds": {"min_contributors": 50}}
    found = HubProcess(folder, config, base_model=str(tiny_base))
    found.configure({"listen": "0.0.0.0:0", "soup": {"aggregator": "mean", "num_malicious_nodes": 0}})
    yield found.start()
    found.stop()


def client_of(hub: HubProcess, folder: Path, host: str = "127.0.0.1") -> HubClient:
    home, address = Home.open(folder), Address.parse(f"{host}:{hub.port}")
    return HubClient(home, address, establish(home, address, hub.fingerprint, lambda _: False))


@pytest.fixture
def honest(hub: HubProcess, tmp_path: Path) -> Iterator[HubClient]:
    """Somebody who is logged in before the flood begins."""
    with client_of(hub, tmp_path / "honest") as client:
        enter(client, "honest", "")
        yield client


@pytest.fixture
def flooder(hub: HubProcess, tmp_path: Path) -> Iterator[HubClient]:
    with client_of(hub, tmp_path / "flooder", FLOOD_HOST) as client:
        enter(client, "flooder", "")
        yield client


@pytest.fixture(autouse=True)
def _memory_stays(hub: HubProcess) -> Iterator[None]:
    before = memory(hub)
    yield
    assert memory(hub) - before < GROWTH_BYTES


def memory(hub: HubProcess) -> int:
    for line in Path(f"/proc/{hub.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the hub is gone")


def flooding(hub: HubProcess) -> int:
    """Connections that the flooder has at the hub's end, from the kernel's table."""
    end = f"00000000000000000000000001000000:{hub.port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]]
    return sum(row[1] == end and row[3] == "01" for row in rows)


def stubs(stack: ExitStack, client: HubClient, number: int) -> list[Any]:
    """As many connections of their own."""
    found = []
    for _ in range(number):
        own = [("grpc.ssl_target_name_override", TLS_NAME), ("grpc.use_local_subchannel_pool", 1)]
        credentials = grpc.ssl_channel_credentials(client.pin.certificate_pem.encode())
        channel = grpc.secure_channel(str(client.address), credentials, options=[*CHANNEL_OPTIONS, *own])
        stack.callback(channel.close)
        found.append(HubStub(channel))
    return found


def assert_served(hub: HubProcess, honest: HubClient, folder: Path) -> None:
    """Who is there is answered, and so is a newcomer, who may enrol."""
    assert honest.call("Account", pb.AccountRequest()).name == "honest"
    with client_of(hub, folder / "newcomer") as newcomer:
        assert newcomer.status().server_round >= 0
        enter(newcomer, "newcomer", "")
        assert newcomer.call("Account", pb.AccountRequest()).name == "newcomer"


def test_eleven_hundred_mute_connections_of_one_address_are_cut_to_its_share_and_keep_nobody_out(
    hub: HubProcess, honest: HubClient, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        for _ in range(1_100):
            stack.enter_context(socket.create_connection(("::1", hub.port), 30))
        assert_served(hub, honest, tmp_path)
        share = LIMITS["connections_per_address"]
        hub.wait_for("the share", lambda: flooding(hub) <= share)
        hub.wait_for("the end of all", lambda: flooding(hub) == 0)
    assert_served(hub, honest, tmp_path)


@pytest.mark.slow  # tests/contract/test_call_limits.py does the same without a process
def test_a_thousand_work_streams_of_one_account_leave_one(
    hub: HubProcess, honest: HubClient, flooder: HubClient, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        flood, metadata = stubs(stack, flooder, 40), ((SESSION_KEY, flooder._session),)
        ended = []
        for number in range(1_000):
            call = flood[number % 40].Work(pb.WorkRequest(), metadata=metadata)
            call.add_callback(lambda call=call: ended.append(call))
        hub.wait_for("the end of all but a few", lambda: len(ended) >= 990)
        assert_served(hub, honest, tmp_path)
        connected = "SELECT count(*) FROM nodes WHERE contributor = ? AND connected_until > ?"
        with closing(sqlite3.connect(hub.folder / "hub.db")) as database:
            found = database.execute(connected, (flooder.pin.contributor, time.time())).fetchone()
            assert found[0] == 1, "its last stream is let be"


@pytest.mark.slow  # tests/contract/test_call_limits.py does the same without a process
def test_a_thousand_mute_uploads_of_one_account_end_and_hold_up_nobody(
    hub: HubProcess, honest: HubClient, flooder: HubClient, tmp_path: Path
) -> None:
    over = threading.Event()

    def never() -> Iterator[pb.UploadChunk]:
        over.wait(SECONDS)
        yield from ()

    with ExitStack() as stack:
        flood, metadata = stubs(stack, flooder, 40), ((SESSION_KEY, flooder._session),)
        calls = [flood[n % 40].Upload.future(never(), metadata=metadata) for n in range(200)]
        assert_served(hub, honest, tmp_path)
        codes = {call.code() for call in calls}
        over.set()
        assert codes <= {grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert_served(hub, honest, tmp_path)


@pytest.mark.parametrize("method", quick(["Account", "Status", "Enrol"], "Enrol"))
def test_a_flood_of_calls_is_refused_beyond_its_share_and_the_log_stays_short(
    hub: HubProcess, honest: HubClient, flooder: HubClient, tmp_path: Path, method: str
) -> None:
    request = {"Account": pb.AccountRequest(), "Status": pb.StatusRequest(), "Enrol": pb.EnrolRequest()}[
        method
    ]
    metadata = ((SESSION_KEY, flooder._session),) if method == "Account" else ()
    lines = len(hub.log().splitlines())
    with ExitStack() as stack:
        flood = stubs(stack, flooder, 20)
        calls = [
            getattr(flood[n % 20], method).future(request, timeout=SECONDS, metadata=metadata)
            for n in range(1_500)
        ]
        assert_served(hub, honest, tmp_path)
        refused = 0
        for call in calls:
            with suppress(grpc.RpcError):
                call.result()
            refused += call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused >= 100
    assert len(hub.log().splitlines()) - lines < 100


@pytest.mark.slow  # tests/contract/test_call_limits.py does the same without a process
def test_three_hundred_installations_of_one_account_leave_eight(
    hub: HubProcess, honest: HubClient, flooder: HubClient, tmp_path: Path
) -> None:
    for number in range(300):
        flooder._instance = f"instance{number:04d}"
        with suppress(GymError):
            flooder.authenticate()
    assert_served(hub, honest, tmp_path)
    with closing(sqlite3.connect(hub.folder / "hub.db")) as database:
        mine = "SELECT count(*) FROM nodes WHERE contributor = ?"
        assert database.execute(mine, (flooder.pin.contributor,)).fetchone()[0] == 8
