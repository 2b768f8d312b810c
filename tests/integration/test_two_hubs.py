"""Two hubs on one port: the second to start ends with its exit status and names the port."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode
from tests.support.hub import HubProcess, gym_server
from tests.support.quick import quick
from tests.support.warm import run

NOBODY = 65534


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[HubProcess]:
    found = HubProcess(tmp_path_factory.mktemp("two-hubs") / "first", base_model=str(tiny_base)).start()
    yield found
    found.stop()


def assert_refused(folder: Path, base: Path, listen: str) -> None:
    if not folder.exists():
        gym_server("init", "--dir", str(folder), "--enrolment", "open", "--base", str(base))
    done = run(["gym-server", "run", "--dir", folder, "--json", "--set", f"listen='{listen}'"])
    port = listen.rpartition(":")[2]
    assert done.returncode == ErrorCode.ADDRESS_IN_USE.exit_code, done.stderr
    assert port in done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads(done.stderr)["error"]["code"] == "address-in-use", "all that it says"
    assert done.stdout == ""


@pytest.mark.parametrize("host", quick(["127.0.0.1", "0.0.0.0", "[::]", "localhost"], "127.0.0.1", "[::]"))
def test_a_second_hub_on_a_port_that_a_hub_has_leaves_and_names_the_port(
    hub: HubProcess, tmp_path: Path, tiny_base: Path, host: str
) -> None:
    assert_refused(tmp_path / "second", tiny_base, f"{host}:{hub.port}")
    assert "round_state" not in hub.log()
    with socket.create_connection(("127.0.0.1", hub.port), 5):
        pass  # the first one is still there


@pytest.mark.parametrize("held", quick(["127.0.0.1", "0.0.0.0"], "127.0.0.1"))
def test_a_port_that_somebody_shares_out_is_not_shared_by_a_hub(
    tmp_path: Path, tiny_base: Path, held: str
) -> None:
    with socket.socket() as foreign:
        foreign.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        foreign.bind((held, 0))
        foreign.listen()
        for host in ("127.0.0.1", "0.0.0.0"):
            assert_refused(tmp_path / "second", tiny_base, f"{host}:{foreign.getsockname()[1]}")


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process is started by root alone")
def test_another_user_cannot_listen_beside_a_hub_that_came_first(hub: HubProcess) -> None:
    for user in (0, NOBODY):
        child = os.fork()
        if child == 0:
            os.setuid(user)
            other = socket.socket()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            os._exit(_bound(other, hub.port))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == errno.EADDRINUSE


def _bound(other: socket.socket, port: int) -> int:
    """The error of binding; 0 when it was possible."""
    try:
        other.bind(("127.0.0.1", port))
    except OSError as error:
        return error.errno or 1
    return 0
