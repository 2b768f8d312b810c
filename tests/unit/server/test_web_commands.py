"""`gym-server dashboard-keys`, and where `gym-server run` and `gym-server dashboard` take their address."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from gym_server.cli.main import app
from gym_server.cli.run import run_hub
from gym_server.federation import Federation, read_config
from typer.testing import CliRunner

from gym_fed.core.errors import ErrorCode, GymError
from tests.support.loopback_hub import LoopbackHub


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    hub = LoopbackHub(tmp_path / "hub")
    hub.close()
    return tmp_path / "hub"


@pytest.fixture
def taken() -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def asked(folder: Path, *words: str) -> Any:
    done = CliRunner().invoke(app, ["dashboard-keys", *words, "--dir", str(folder), "--json"])
    if done.exception is not None:
        raise done.exception
    return json.loads(done.stdout)


def test_keys_are_added_listed_without_the_key_and_removed(folder: Path) -> None:
    made = asked(folder, "add", "otto", "--role", "operator")
    assert made["key"].startswith("gymweb-")
    assert [(one["name"], one["role"]) for one in asked(folder, "list")] == [("otto", "operator")]
    assert made["key"] not in json.dumps(asked(folder, "list"))
    assert made["key"] not in (folder / "keys" / "web_keys.json").read_text()
    assert asked(folder, "remove", "otto") == {"removed": "otto"}
    assert asked(folder, "list") == []


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("add", "../otto"), ErrorCode.USAGE),
        (("remove", "nobody"), ErrorCode.NOT_FOUND),
    ],
)
def test_what_is_no_key_is_refused(words: tuple[str, ...], code: ErrorCode, folder: Path) -> None:
    with pytest.raises(GymError) as refused:
        asked(folder, *words)
    assert refused.value.code is code


def test_keys_belong_to_a_hub(tmp_path: Path) -> None:
    with pytest.raises(GymError) as refused:
        asked(tmp_path, "list")
    assert refused.value.code is ErrorCode.FILE_NOT_FOUND
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("by_config", [True, False])
def test_a_taken_address_is_refused_before_rounds_begin(by_config: bool, folder: Path, taken: str) -> None:
    if by_config:
        path = folder / "gym-server.yaml"
        path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "dashboard": {"listen": taken}}))
    listening: list[int] = []
    with pytest.raises(GymError) as refused:
        run_hub(
            folder,
            dashboard=None if by_config else taken,
            on_listening=lambda fed, port: listening.append(port),
        )
    assert refused.value.code is ErrorCode.ADDRESS_IN_USE
    assert listening == []
    with Federation.open(folder) as fed:
        assert fed.round_store.current() is None


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.0.0.1:70000", "no host:1", ""])
def test_an_address_that_is_none_is_refused_in_the_config(listen: str, folder: Path) -> None:
    with pytest.raises(GymError) as refused:
        read_config(folder, (f"dashboard.listen={json.dumps(listen)}",))
    assert refused.value.code is ErrorCode.CONFIG_INVALID
    assert "dashboard.listen" in str(refused.value)


def test_others_are_served_with_a_key_or_in_public_alone(folder: Path) -> None:
    done = CliRunner().invoke(app, ["dashboard", "--dir", str(folder), "--host", "0.0.0.0", "--port", "0"])
    assert isinstance(done.exception, GymError)
    assert "gym-server dashboard-keys add" in str(done.exception.hint)
