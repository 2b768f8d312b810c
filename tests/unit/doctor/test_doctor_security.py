"""`gym doctor --security`: modes of keys, secrets, addresses, dates, advisories, each with a remedy."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from gym_client.identity.home import Home
from gym_server.cli.main import app as server
from packaging.version import Version
from typer.testing import CliRunner, Result

from gym_fed.cli.main import app as gym
from gym_fed.config.hub.server import ServerConfig
from gym_fed.doctor import security
from gym_fed.doctor.check import Finding, Level
from gym_fed.trust.identity.tls import certificate_request, create_certificate, validity
from tests.support.authority import Authority

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no file modes")
DAY = 86400.0


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "hub"
    done = CliRunner().invoke(server, ["init", "--dir", str(folder), "--name", "tests"])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "user"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_TOKEN_PATH", "PGPASSFILE"):
        monkeypatch.delenv(name, raising=False)
    home = Home.open(tmp_path / "home")
    assert home.key
    return home.folder


def checked(home: Path, hub: Path) -> Result:
    return CliRunner().invoke(
        gym,
        ["doctor", "--security", "--home", str(home), "--dir", str(hub), "--json"],
        catch_exceptions=False,
    )


def findings_of(home: Path, hub: Path, name: str) -> list[Finding]:
    return [finding for finding in security.security_findings(home, hub) if finding.check == name]


def test_a_new_hub_and_a_new_home_pass_every_security_check(home: Path, hub: Path) -> None:
    done = checked(home, hub)
    report = json.loads(done.stdout)
    wrong = [finding for finding in report["findings"] if finding["level"] != "ok"]
    assert (done.exit_code, wrong) == (0, [])
    seen = {finding["check"] for finding in report["findings"]}
    assert {"home", "key: home", "key: hub", "listen: hub", "certificate", "database", "invites"} <= seen


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_key_that_others_can_read_fails_the_command_with_its_path_and_remedy(
    mode: int, home: Path, hub: Path
) -> None:
    key = home / "key.pem"
    key.chmod(mode)
    done = checked(home, hub)
    report = json.loads(done.stdout)
    (finding,) = (finding for finding in report["findings"] if finding["level"] == "fail")
    assert done.exit_code == 1
    assert str(key) in finding["finding"]
    assert f"{mode:04o}" in finding["finding"]
    assert f"chmod 600 {key}" in finding["remedy"]


@pytest.mark.parametrize("name", ["ledger.pem", "tls.key", "session.key"])
def test_each_private_key_of_a_hub_is_looked_at_and_its_public_certificate_is_not(
    name: str, home: Path, hub: Path
) -> None:
    key = hub / "keys" / name
    key.chmod(0o644)
    try:
        failed = [f for f in findings_of(home, hub, "key: hub") if f.level is Level.FAIL]
    finally:
        key.chmod(0o600)
    assert [str(key) in f.finding for f in failed] == [True]
    assert not any("tls.crt" in f.finding for f in findings_of(home, hub, "key: hub"))


@pytest.mark.parametrize(("mode", "level"), [(0o700, Level.OK), (0o755, Level.WARN), (0o777, Level.FAIL)])
def test_a_home_is_judged_by_what_others_can_do_with_it(
    mode: int, level: Level, home: Path, tmp_path: Path
) -> None:
    home.chmod(mode)
    assert [f.level for f in findings_of(home, tmp_path, "home")] == [level]


def test_a_world_readable_token_fails_unless_a_folder_above_it_is_closed(home: Path, tmp_path: Path) -> None:
    token = tmp_path / "hf" / "token"
    token.parent.mkdir()
    token.write_text("hf_x", encoding="utf-8")
    token.chmod(0o644)
    folders = [folder for folder in token.parents if folder.owner() == token.owner()]
    modes = {folder: folder.stat().st_mode & 0o7777 for folder in folders}
    try:
        for folder, mode in modes.items():
            folder.chmod(mode | 0o001)
        (finding,) = findings_of(home, tmp_path, "secret")
        assert (finding.level, finding.remedy) == (Level.FAIL, f"chmod 600 {token}")
        token.parent.chmod(0o700)
        assert [f.level for f in findings_of(home, tmp_path, "secret")] == [Level.OK]
    finally:
        for folder, mode in modes.items():
            folder.chmod(mode)


@pytest.mark.parametrize(
    ("left", "level"),
    [(timedelta(days=90), Level.OK), (timedelta(days=3), Level.WARN), (timedelta(days=-1), Level.FAIL)],
)
def test_a_certificate_is_judged_by_the_days_that_are_left(
    left: timedelta, level: Level, tmp_path: Path
) -> None:
    create_certificate(tmp_path / "tls.key", tmp_path / "own.crt")
    request = certificate_request((tmp_path / "tls.key").read_bytes(), "hub.example.org")
    (tmp_path / "tls.crt").write_bytes(Authority(tmp_path).sign(request, days=120))
    now = validity((tmp_path / "tls.crt").read_bytes())[1] - left
    finding = security.judge_certificate(tmp_path / "tls.crt", now)
    assert finding.level is level
    assert (level is Level.OK) or "gym-server certificate" in finding.remedy


def test_a_certificate_that_is_not_one_fails(tmp_path: Path) -> None:
    (tmp_path / "tls.crt").write_bytes(b"nonsense")
    finding = security.judge_certificate(tmp_path / "tls.crt", datetime.now(UTC))
    assert finding.level is Level.FAIL
    assert "not a PEM certificate" in finding.finding


@pytest.mark.parametrize(
    "url", ["postgresql+psycopg://u:swordfish@h/d", "postgresql://h/d?password=swordfish"]
)
@pytest.mark.parametrize(("mode", "level"), [(0o644, Level.FAIL), (0o600, Level.WARN)])
def test_a_password_in_the_database_url_is_found_and_never_shown(
    url: str, mode: int, level: Level, tmp_path: Path
) -> None:
    config = tmp_path / "gym-server.yaml"
    config.write_text("", encoding="utf-8")
    config.chmod(mode)
    finding = security.judge_database(config, url)
    assert finding.level is level
    assert "swordfish" not in str(finding)
    assert "PGPASSFILE" in finding.remedy


def test_an_open_enrolment_warns_only_where_others_reach_the_hub() -> None:
    policy = {"policy": "open"}
    loopback = ServerConfig.model_validate({"enrolment": policy})
    reachable = ServerConfig.model_validate({"enrolment": policy, "listen": "0.0.0.0:9443"})
    assert security.judge_listen(loopback).level is Level.OK
    finding = security.judge_listen(reachable)
    assert finding.level is Level.WARN
    assert "0.0.0.0:9443" in finding.finding


@pytest.mark.parametrize(
    ("listen", "public", "level"),
    [
        ("0.0.0.0:9444", True, Level.WARN),
        ("0.0.0.0:9444", False, Level.OK),
        ("127.0.0.1:9444", True, Level.OK),
    ],
)
def test_a_dashboard_without_keys_warns_only_where_others_reach_it(
    listen: str, public: bool, level: Level
) -> None:
    assert security.judge_dashboard(listen, public).level is level


@pytest.mark.parametrize(("days", "level"), [(7, Level.OK), (365, Level.WARN), (-1, Level.OK)])
def test_an_unused_invite_that_is_valid_for_long_warns(days: int, level: Level, tmp_path: Path) -> None:
    database = tmp_path / "hub.db"
    now = 1_000_000.0
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE invites (expires_at REAL, used_by TEXT)")
        connection.execute("INSERT INTO invites VALUES (?, NULL)", (now + days * DAY,))
        connection.execute("INSERT INTO invites VALUES (?, 'somebody')", (now + 999 * DAY,))
    finding = security.judge_invites(database, now)
    assert finding.level is level
    assert ("1 unused invite" if days > 0 else "0 unused invites") in finding.finding


def test_a_config_that_is_refused_fails_with_its_reason(home: Path, tmp_path: Path) -> None:
    (tmp_path / "gym-server.yaml").write_text("lisen: 127.0.0.1:1\n", encoding="utf-8")
    (finding,) = findings_of(home, tmp_path, "hub")
    assert finding.level is Level.FAIL
    assert "lisen" in finding.finding


def test_a_version_below_its_minimum_fails_with_the_advisory() -> None:
    finding = security.judge_version("jinja2", "3.1.5", "3.1.6", "CVE-2025-27516")
    assert finding.level is Level.FAIL
    assert "CVE-2025-27516" in finding.finding
    assert "jinja2>=3.1.6" in finding.remedy
    assert security.judge_version("jinja2", "3.10", "3.1.6", "").level is Level.OK


def test_the_pinned_versions_are_at_or_above_every_known_minimum() -> None:
    pins = dict(
        line.lower().split("==")
        for line in Path(__file__).parents[3].joinpath("constraints.txt").read_text("utf-8").splitlines()
        if "==" in line
    )
    assert security.MINIMUMS.keys() & pins.keys()
    for name in security.MINIMUMS.keys() & pins.keys():
        assert Version(pins[name]) >= Version(security.MINIMUMS[name][0]), name
