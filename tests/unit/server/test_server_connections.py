"""The limiter of connections: it hangs up on what an address has too much, and touches no other file of the process."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from gym_server.rpc.connections import ConnectionLimiter

from tests.support.loopback_hub import LoopbackHub
from tests.support.wait import SECONDS, until

if not Path("/proc/self/fd").is_dir():
    pytest.skip("the limiter reads /proc/self/fd", allow_module_level=True)


def watching(listener: socket.socket, per_address: int) -> ConnectionLimiter:
    limiter = ConnectionLimiter(per_address)
    limiter._port = listener.getsockname()[1]
    return limiter


def connected(
    stack: ExitStack, listener: socket.socket, number: int
) -> list[tuple[socket.socket, socket.socket]]:
    pairs = []
    for _ in range(number):
        client = stack.enter_context(socket.create_connection(listener.getsockname()))
        pairs.append((client, stack.enter_context(listener.accept()[0])))
    return pairs


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


def test_beyond_the_share_the_oldest_that_never_called_go_first() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        pairs, limiter = connected(stack, listener, 5), watching(listener, 3)
        limiter.called(f"ipv4:127.0.0.1:{pairs[0][0].getsockname()[1]}")
        assert limiter.close_excess() == 2
        still = [is_open(client) for client, _ in pairs]
        assert still == [True, False, False, True, True], (
            "the first one made a call; of the others the oldest go"
        )
        for client, accepted in pairs:
            if not is_open(client):
                accepted.close()  # as gRPC does
        assert limiter.close_excess() == 0, "three are within the share"
        assert limiter.hung_up == 2


def test_a_started_limiter_looks_by_itself() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        connected(stack, listener, 3)
        limiter = ConnectionLimiter(2)
        stack.callback(limiter.stop)
        limiter.start(listener.getsockname()[1])
        until(lambda: limiter.hung_up == 1, "one connection less", seconds=20)


def test_beyond_the_hubs_connections_further_ones_are_closed_at_once(tmp_path: Path) -> None:
    """gRPC counts them; a hub behind which nobody has more than a share of its own still has a bound in all."""
    hub, most = LoopbackHub(tmp_path / "hub", limits={"connections": 16, "handshake_seconds": 600}), 16
    try:
        with ExitStack() as stack:
            where = ("127.0.0.1", int(hub.address.rpartition(":")[2]))
            clients = [stack.enter_context(socket.create_connection(where)) for _ in range(most + 8)]
            end = time.monotonic() + SECONDS
            while (still := [is_open(client) for client in clients]).count(True) > most:
                assert time.monotonic() < end, still.count(True)
                time.sleep(0.02)
            assert still.count(True) == most
    finally:
        hub.close()


def test_a_connection_that_never_begins_its_handshake_is_closed_when_the_limit_says(tmp_path: Path) -> None:
    """gRPC's own limit is two minutes."""
    hub = LoopbackHub(tmp_path / "hub", limits={"handshake_seconds": 0.5})
    try:
        with socket.create_connection(("127.0.0.1", int(hub.address.rpartition(":")[2]))) as mute:
            assert is_open(mute)
            end = time.monotonic() + SECONDS
            while is_open(mute):
                assert time.monotonic() < end
                time.sleep(0.05)
    finally:
        hub.close()


def test_looking_gives_up_no_lock_of_a_file_that_the_process_holds(tmp_path: Path) -> None:
    """Closing any handle of a file drops the process's POSIX locks on it, as SQLite has on its database."""
    with ExitStack() as stack:
        file = stack.enter_context(open(tmp_path / "locked", "wb"))
        fcntl.lockf(file, fcntl.LOCK_EX)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        connected(stack, listener, 5)
        before = sorted(os.listdir("/proc/self/fd"))
        assert watching(listener, 2).close_excess() == 3
        assert sorted(os.listdir("/proc/self/fd")) == before, "and opens or closes none"
        other = f"import fcntl; fcntl.lockf(open({str(file.name)!r}, 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        done = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True)
        assert "BlockingIOError" in done.stderr
