"""`gym-client` at the terminal: quick help, consent, exit codes, JSON."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gym_client.cli.join import enter
from gym_client.display import PlainDisplay
from gym_client.hub.transport import HubClient
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.trust import establish
from rich.console import Console

from gym_fed.core.text import readable_bytes
from tests.support.in_process import run_here
from tests.support.tiny_hub import TinyHub


def gym_client(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_here(["gym-client", *map(str, arguments)])


def error_of(*arguments: object) -> dict[str, Any]:
    done = gym_client(*arguments, "--json")
    assert done.returncode != 0
    found: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])["error"]
    return found


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[TinyHub]:
    hub = TinyHub(tmp_path / "hub").start()
    yield hub
    hub.stop()


def test_the_id_is_made_once(tmp_path: Path) -> None:
    first = gym_client("id", "--home", tmp_path / "h")
    assert first.stdout.startswith("c")
    reply = json.loads(gym_client("id", "--home", tmp_path / "h", "--json").stdout)
    assert reply["contributor"] == first.stdout.strip()


def test_without_a_terminal_an_unknown_key_needs_yes_or_its_fingerprint(tmp_path: Path, hub: TinyHub) -> None:
    error = error_of("join", "--server", hub.address, "--home", tmp_path / "h")
    assert error["code"] == "usage"
    assert hub.fingerprint in error["message"]
    assert "--yes" in error["hint"]


def test_a_wrong_fingerprint_ends_with_its_own_exit_code(tmp_path: Path, hub: TinyHub) -> None:
    wrong = "sha256:" + "0" * 64
    done = gym_client("join", "--server", hub.address, "--home", tmp_path / "h", "--fingerprint", wrong)
    assert done.returncode == 62
    assert hub.fingerprint in done.stderr


def test_nobody_there_is_unavailable(tmp_path: Path) -> None:
    error = error_of("join", "--server", "127.0.0.1:1", "--home", tmp_path / "h", "--no-wait")
    assert error["code"] == "unavailable"
    assert "127.0.0.1:1" in error["message"]


def test_data_that_is_not_there_is_named_before_the_server_is_asked(tmp_path: Path) -> None:
    error = error_of("join", "--server", "127.0.0.1:1", "--home", tmp_path / "h", "--data", "no.jsonl")
    assert error["code"] == "file-not-found"
    assert "no.jsonl" in error["message"]


def test_a_hub_that_announces_no_terms_is_not_joined(tmp_path: Path, hub: TinyHub) -> None:
    error = error_of("join", "--server", hub.address, "--home", tmp_path / "h", "--yes")
    assert error["code"] == "policy-refused"
    assert "the recipe that the server announces is invalid" in error["message"]
    assert not hub.enrolled


def test_status_and_leave(tmp_path: Path, hub: TinyHub) -> None:
    place = ("--server", hub.address, "--home", tmp_path / "h")
    home, address = Home.open(tmp_path / "h"), Address.parse(hub.address)
    client = HubClient(home, address, establish(home, address, hub.fingerprint, lambda _: False))
    enter(client, "me", "")
    client.close()
    hub.verdicts = [
        {"update": "a" * 64, "server_round": 1, "verdict": "merged", "reason": "", "bytes": 10, "credit": 3}
    ]
    reply = json.loads(gym_client("status", *place, "--json").stdout)
    assert (reply["balance"], reply["verdicts"]) == (3, hub.verdicts)
    assert "merged" in gym_client("status", *place).stdout
    residual = home.residuals(client.pin.server) / "residual.safetensors"
    residual.write_bytes(b"x")
    for server in (client.pin.server, "s" + "0" * 16):
        digests = dict.fromkeys(("base_digest", "version_digest"), "sha256:" + "b" * 64)
        spec = {"server": server, "server_round": 1, "base_model": "tiny", **digests}
        (home.audits / server).mkdir()
        (home.audits / server / "task.json").write_text(
            json.dumps({**spec, "max_update_bytes": 1, "deadline_seconds": 1})
        )
    assert gym_client("leave", *place).returncode == 0
    assert not residual.exists()
    assert [kept.name for kept in home.audits.iterdir()] == ["s" + "0" * 16]
    reply = json.loads(gym_client("status", "--home", tmp_path / "h", "--json").stdout)
    assert reply["balance"] == 3  # what was earned stays, and the home knows where
    assert error_of("leave", *place)["code"] == "unauthenticated"


def test_plain_lines_come_about_ten_a_phase() -> None:
    console = Console(record=True, width=80, file=open("/dev/null", "w"))  # noqa: SIM115
    display = PlainDisplay(console)
    for step in range(1, 1001):
        display.progress("train", step, 1000, 2.0)
    lines = console.export_text().splitlines()
    assert 10 <= len(lines) <= 11
    assert lines[-1] == "training 1000/1000, loss 2.0000"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (35_192, "35.2 kB"), (2_500_000, "2.5 MB"), (3e9, "3.00 GB")],
)
def test_sizes_are_readable(num_bytes: float, text: str) -> None:
    assert readable_bytes(num_bytes) == text
