"""gRPC's health protocol, and `gym-server health` over TLS with the hub's own certificate."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from gym_server.cli.main import app
from gym_server.store.unavailable import StoreUnavailable
from typer.testing import CliRunner, Result

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.tls import TLS_NAME, create_certificate
from gym_fed.trust.wire.limits import CHANNEL_OPTIONS
from gym_fed.trust.wire.service import HealthStub
from tests.support.loopback_hub import LoopbackHub
from tests.support.wait import SECONDS


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[LoopbackHub]:
    running = LoopbackHub(tmp_path / "hub")
    yield running
    running.close()


def ask(hub: LoopbackHub, *words: str) -> Result:
    folder = str(hub.fed.folder)
    return CliRunner().invoke(app, ["health", "--dir", folder, "--address", hub.address, *words])


def refusal(result: Result) -> GymError:
    assert isinstance(result.exception, GymError), result.output
    return result.exception


@pytest.mark.parametrize("words", [[], ["--live"]])
def test_a_running_hub_is_healthy(hub: LoopbackHub, words: list[str]) -> None:
    result = ask(hub, *words, "--json")
    assert result.exit_code == 0, result.exception
    assert json.loads(result.stdout)["ready"] == (None if words else True)


def test_a_hub_whose_database_is_away_is_alive_and_not_ready(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away() -> None:
        raise StoreUnavailable(GymError(ErrorCode.UNAVAILABLE, "no database at db.example.org"))

    monkeypatch.setattr(type(hub.fed.database), "reading", lambda self: away())
    assert ask(hub, "--live").exit_code == 0
    refused = refusal(ask(hub))
    assert (refused.code, "its database does not answer" in refused.message) == (ErrorCode.UNAVAILABLE, True)


def test_a_stopped_hub_is_not_healthy(hub: LoopbackHub) -> None:
    address = hub.address
    hub.close()
    result = CliRunner().invoke(app, ["health", "--dir", str(hub.fed.folder), "--address", address, "--live"])
    assert refusal(result).code is ErrorCode.UNAVAILABLE
    hub.__init__(hub.fed.folder)  # type: ignore[misc]  # for the fixture, which closes it


def test_another_hub_at_the_address_is_not_healthy(hub: LoopbackHub, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(hub.fed.folder / "keys", other / "keys")
    shutil.copy(hub.fed.folder / "gym-server.yaml", other)
    create_certificate(other / "keys" / "tls.key", other / "keys" / "tls.crt")
    result = CliRunner().invoke(
        app, ["health", "--dir", str(other), "--address", hub.address, "--timeout", "2"]
    )
    assert refusal(result).code is ErrorCode.UNAVAILABLE


def test_a_caller_above_its_limit_still_finds_the_hub_healthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_server.rpc.auth_interceptor._REFUSAL_SECONDS", 0.1)
    limits = {"calls_per_second": 0.001, "calls_per_address": 1}
    hub = LoopbackHub(tmp_path / "hub", limits=limits)
    try:
        assert ask(hub).exit_code == 0
        assert ask(hub, "--timeout", str(SECONDS)).exit_code == 0
    finally:
        hub.close()


@pytest.mark.parametrize(
    ("text", "words", "code"),
    [
        ("listen: nowhere\n", [], ErrorCode.CONFIG_INVALID),
        ("listen: 127.0.0.1:0\n", [], ErrorCode.CONFIG_INVALID),
        ("{}\n", ["--address", "nowhere"], ErrorCode.USAGE),
    ],
)
def test_an_address_that_is_none_is_refused(
    hub: LoopbackHub, text: str, words: list[str], code: ErrorCode
) -> None:
    (hub.fed.folder / "gym-server.yaml").write_text(text)
    result = CliRunner().invoke(app, ["health", "--dir", str(hub.fed.folder), *words])
    assert refusal(result).code is code


def test_a_folder_without_a_hub_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["health", "--dir", str(tmp_path)])
    assert refusal(result).code is ErrorCode.FILE_NOT_FOUND


def test_the_protocol_is_gRPCs_own(hub: LoopbackHub) -> None:
    pem = (hub.fed.folder / "keys" / "tls.crt").read_bytes()
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", TLS_NAME)]
    with grpc.secure_channel(hub.address, grpc.ssl_channel_credentials(pem), options) as channel:
        stub = HealthStub(channel)
        for name in ("", "gym.fed.v1.Hub"):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=SECONDS)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
        for call, status in (
            (stub.Check, grpc.StatusCode.NOT_FOUND),
            (lambda *a, **k: next(stub.Watch(*a, **k)), grpc.StatusCode.UNIMPLEMENTED),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                call(health_pb2.HealthCheckRequest(service="other"), timeout=SECONDS)
            assert refused.value.code() is status


def test_the_address_of_all_interfaces_is_asked_on_this_machine(
    hub: LoopbackHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("gym_server.cli.health._check", lambda folder, address, *_: asked.append(address))
    for listen in ("0.0.0.0:9443", "'[::]:9443'", "10.0.0.2:9443"):
        (hub.fed.folder / "gym-server.yaml").write_text(f"listen: {listen}\n")
        CliRunner().invoke(app, ["health", "--dir", str(hub.fed.folder)], catch_exceptions=False)
    assert asked == ["127.0.0.1:9443", "[::1]:9443", "10.0.0.2:9443"]
