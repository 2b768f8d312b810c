"""`gym-client ui`: only this machine may use the page, and what its buttons do to the home."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from gym_client.agent.pauses import is_paused
from gym_client.agent.policy import Policy
from gym_client.cli.join_options import JoinOptions, find_target
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.pins import ServerPin
from gym_client.removal import client_files_of, remove
from gym_client.web import contribute
from gym_client.web.app import open_ui
from gym_client.web.contribute import _user_of
from starlette.testclient import TestClient

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.login import Invite, find_invite, format_invite, parse_invite
from gym_fed.web import uploads
from gym_fed.web.jobs import Jobs, WebJob
from gym_fed.web.server import WebServer
from tests.support.in_process import run_here

API = "/api/v1"
LINK = format_invite(Invite("hub.example.org", 9443, f"sha256:{'a' * 64}", "b" * 32))


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home")


@pytest.fixture
def server(home: Home) -> Iterator[WebServer]:
    found, _ = open_ui(home, "127.0.0.1:0")
    yield found
    found.stop()


@pytest.fixture
def page(server: WebServer) -> TestClient:
    """A browser that opened the printed URL."""
    client = TestClient(server.app, base_url=server.address)
    token = server.url.partition("token=")[2]
    assert client.post(f"{API}/login", json={"key": token}).status_code == 200
    client.headers["X-CSRF-Token"] = client.get(f"{API}/session").json()["csrf"]
    return client


def enrol(home: Home, address: str = "hub.example.org:9443") -> None:
    key = f"sha256:{'a' * 64}"
    pin = ServerPin(
        address=address, fingerprint=key, certificate_pem="", contributor="c" * 33, name="our hub"
    )
    pin.save(home, Address.parse(address))


def test_only_this_machine_with_the_token_of_the_url_may_use_the_page(
    home: Home, server: WebServer, page: TestClient
) -> None:
    with pytest.raises(GymError, match="not a loopback address") as caught:
        open_ui(home, "0.0.0.0:0")
    assert caught.value.code is ErrorCode.USAGE
    stranger = TestClient(server.app, base_url=server.address)
    assert stranger.get(f"{API}/join").status_code == 401
    assert page.get(f"{API}/join").status_code == 200
    assert page.get(f"{API}/join", headers={"Host": "evil.example"}).status_code == 403, "DNS rebinding"
    assert page.post(f"{API}/join/pause", headers={"Origin": "http://evil.example"}).status_code == 403
    del page.headers["X-CSRF-Token"]
    for path in (
        "/join",
        "/join/invite",
        "/join/pause",
        "/join/limits",
        "/join/leave",
        "/uninstall",
        "/data/uploads",
    ):
        assert page.post(f"{API}{path}", json={}).status_code == 403, path
    assert not is_paused(home)


def test_a_pause_holds_for_every_agent_of_the_home(home: Home, page: TestClient) -> None:
    assert page.post(f"{API}/join/pause").status_code == 200
    assert is_paused(home)
    assert page.get(f"{API}/join").json()["agent"]["is_paused"]
    assert page.post(f"{API}/join/resume").status_code == 200
    assert not is_paused(home)
    home.policy_path.write_text("pause: true\n")
    refused = page.post(f"{API}/join/resume")
    assert (refused.status_code, "pause: true" in refused.text) == (403, True)


def test_hours_are_written_into_the_policy_and_all_else_of_it_stays(home: Home, page: TestClient) -> None:
    home.policy_path.write_text("# mine\nmax_steps: 7  # few\nhours:\n  - 01:00-02:00\n")
    given = {"hours": ["22:00-07:00", "12:00-24:00"], "on_battery": "pause"}
    assert page.post(f"{API}/join/limits", json=given).json() == given
    policy = Policy.load(home.policy_path)
    assert (policy.max_steps, policy.hours, policy.on_battery) == (7, given["hours"], "pause")
    assert home.policy_path.read_text().startswith("# mine\nmax_steps: 7  # few\n")
    before = home.policy_path.read_text()
    for wrong in (["25:00-26:00"], ["07:00-07:00"], ["night"]):
        assert page.post(f"{API}/join/limits", json={**given, "hours": wrong}).status_code == 400
    assert home.policy_path.read_text() == before
    page.post(f"{API}/join/limits", json={"hours": [], "on_battery": "train"})
    assert Policy.load(home.policy_path).hours == []


def test_no_policy_is_written_for_the_defaults(home: Home, page: TestClient) -> None:
    page.post(f"{API}/join/limits", json={"hours": [], "on_battery": "train"})
    assert not home.policy_path.exists()


def test_an_unreadable_policy_is_shown_and_not_overwritten(home: Home, page: TestClient) -> None:
    home.policy_path.write_text("hours: 7\n")
    assert "hours" in page.get(f"{API}/join").json()["agent"]["problem"]
    assert page.post(f"{API}/join/limits", json={"hours": [], "on_battery": "train"}).status_code == 422
    assert home.policy_path.read_text() == "hours: 7\n"


def test_the_commands_of_the_page_use_its_home_and_a_pasted_message_holds_the_invite(
    home: Home, page: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def start(self: Jobs, command: list[str], *, title: str, env: dict[str, str] | None = None) -> WebJob:
        started.append((command, env or {}))
        return WebJob("job", title, command, "", 1, 0.0, 0.0)

    monkeypatch.setattr(Jobs, "start", start)
    rows = tmp_path / "elsewhere.jsonl"
    rows.write_text("{}\n")
    message = f"You are invited.\n  pip install gym-fed\nPaste this: {LINK}.\nBye"
    page.post(f"{API}/join", json={"invite": message, "data": str(rows)})
    page.post(f"{API}/join", json={})
    options = [f"--home={home.folder}", "--json"]
    assert started == [
        (["gym-client", "join", *options, "--no-wait", f"--data={rows}"], {"GYM_INVITE": LINK}),
        (["gym-client", "join", *options], {}),
    ]
    assert page.post(f"{API}/join", json={"data": "missing.jsonl"}).status_code == 404


@pytest.mark.parametrize(
    "text", [LINK, f"gym://hub.example.org/{'a' * 64} {LINK}", f"gym://shown.example:1@x/{'a' * 64} {LINK}"]
)
def test_the_page_shows_the_hub_that_is_joined(
    text: str, page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[dict[str, str]] = []

    def start(self: Jobs, command: list[str], *, title: str, env: dict[str, str] | None = None) -> WebJob:
        started.append(env or {})
        return WebJob("job", title, command, "", 1, 0.0, 0.0)

    monkeypatch.setattr(Jobs, "start", start)
    page.post(f"{API}/join", json={"invite": text})
    joined = parse_invite(started[0]["GYM_INVITE"])
    shown = page.post(f"{API}/join/invite", json={"invite": text}).json()
    assert (shown["address"], shown["fingerprint"]) == (f"{joined.host}:{joined.port}", joined.fingerprint)


def test_a_text_without_a_whole_invite_shows_no_hub(page: TestClient) -> None:
    cut = [LINK[:-3], LINK.replace(":9443", ":0"), f"gym://hub.example.org/{'a' * 64}"]
    for text in ("b" * 32, "see you on monday", *cut):
        found = page.post(f"{API}/join/invite", json={"invite": text}).json()
        assert found == {"address": None, "fingerprint": None, "is_cut": text in cut}


def test_an_invite_is_found_in_a_message() -> None:
    assert find_invite(f"<{LINK}>,") == LINK
    assert find_invite(f" {'b' * 32}\n") == "b" * 32, "a bare token"
    assert find_invite(LINK[:-1]) == LINK[:-1], "part of an invite is reported by its parser"


@pytest.mark.parametrize(
    "host", ["\x1b[2Jevil", "hub\u202e.org", "hub.org@evil", "\u043fub.org", "a\u200bb", "a\x07b", "a" * 256]
)
def test_an_invite_with_a_host_that_is_no_name_is_refused_and_shown_escaped(host: str) -> None:
    link = LINK.replace("hub.example.org", host)
    for options in (JoinOptions(invite=link), JoinOptions(server=f"{host}:9443")):
        with pytest.raises(GymError) as error:
            find_target(options)
        assert "\x1b" not in str(error.value)
        assert error.value.message.isprintable()


def test_the_invite_of_an_ipv6_address_names_it_once() -> None:
    address = find_target(JoinOptions(invite=LINK.replace("hub.example.org", "[::1]"))).address
    assert (address.host, str(address)) == ("::1", "[::1]:9443")


def test_links_in_the_folder_of_dropped_files_do_not_break_the_page(home: Home, page: TestClient) -> None:
    data = home.folder / "data"
    data.mkdir()
    (data / "gone.jsonl").symlink_to(home.folder / "nothing")
    (data / "rows.jsonl").write_text("{}\n")
    assert page.get(f"{API}/join").json()["files"] == ["data/rows.jsonl"]


def test_a_part_that_a_full_disk_cut_off_is_written_whole_the_next_time(
    home: Home, page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = b'{"prompt": "a"}\n'
    id = page.post(f"{API}/data/uploads", json={"name": "rows.jsonl", "bytes": len(rows)}).json()["id"]
    headers = {"Content-Type": "application/octet-stream"}

    @contextmanager
    def full(path: Path) -> Iterator[None]:
        yield
        raise GymError(ErrorCode.DISK_FULL, f"{path}: no space left")

    with monkeypatch.context() as patch:
        patch.setattr(uploads, "full_disk_named", full)
        assert page.put(f"{API}/data/uploads/{id}", content=rows, headers=headers).status_code == 507
    sent = page.put(f"{API}/data/uploads/{id}", content=rows, headers=headers)
    assert sent.json()["name"] == "data/rows.jsonl"
    assert (home.folder / "data" / "rows.jsonl").read_bytes() == rows


def test_dropped_files_are_offered_newest_first(home: Home, page: TestClient) -> None:
    for age, name in enumerate(("new.jsonl", "old.csv")):
        given = {"name": name, "bytes": 3}
        id = page.post(f"{API}/data/uploads", json=given).json()["id"]
        headers = {"Content-Type": "application/octet-stream"}
        sent = page.put(f"{API}/data/uploads/{id}", content=b"{}\n", headers=headers).json()
        assert sent == {"name": f"data/{name}"}
        os.utime(home.folder / "data" / name, (1000 - age, 1000 - age))
    assert page.get(f"{API}/join").json()["files"] == ["data/new.jsonl", "data/old.csv"]


def test_an_agent_that_was_started_elsewhere_is_known_by_its_lock(home: Home) -> None:
    assert _user_of(home) is None
    holder = (
        "import sys\nfrom pathlib import Path\nfrom gym_client.identity.home import Home\n"
        "with Home(Path(sys.argv[1])).locked():\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    words = [sys.executable, "-c", holder, str(home.folder)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "held\n"
        assert _user_of(home) == process.pid
        process.stdin.close()
        process.wait()
    assert _user_of(home) is None


def test_uninstall_deletes_what_the_client_wrote_and_nothing_else(
    home: Home, server: WebServer, page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home.folder.parent))
    ended: list[bool] = []
    monkeypatch.setattr(server, "end", lambda: ended.append(True))
    assert home.key.contributor
    (home.folder / "variants").mkdir()
    enrol(home)
    shown = page.get(f"{API}/uninstall").json()
    assert (shown["others"], shown["hubs"]) == (["variants"], ["our hub"])
    assert "key.pem" in shown["files"]
    refused = page.post(f"{API}/uninstall", json={})
    assert (refused.status_code, "our hub" in refused.text) == (400, True)
    with home.locked():
        assert page.post(f"{API}/uninstall", json={"abandon": True}).status_code == 409
    assert (home.folder / "key.pem").exists()
    assert ended == []
    assert page.post(f"{API}/uninstall", json={"abandon": True}).status_code == 200
    assert [path.name for path in home.folder.iterdir()] == ["variants"]
    assert ended == [True]


def test_uninstall_waits_for_the_commands_of_the_page(
    home: Home, page: TestClient, server: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contribute, "_REPORT_SECONDS", 0.01)
    monkeypatch.setattr(server, "end", lambda: None)
    assert contribute._reports.acquire(blocking=False)
    try:
        busy = page.post(f"{API}/uninstall", json={})
    finally:
        contribute._reports.release()
    assert (busy.status_code, busy.json()["error"]["code"]) == (429, "busy")
    assert home.folder.exists()
    assert page.post(f"{API}/uninstall", json={}).status_code == 200
    assert not home.folder.exists()


@pytest.mark.parametrize(("name", "is_known"), [("traffic.json", True), ("lock", True), ("notes.txt", False)])
def test_what_another_command_writes_during_the_deletion_is_deleted_or_named(
    home: Home, name: str, is_known: bool
) -> None:
    listed = client_files_of(home)
    (home.folder / name).write_text("{}")
    if is_known:
        remove(home, listed)
        assert not home.folder.exists()
        return
    with pytest.raises(GymError, match=r"notes\.txt appeared during the deletion") as refused:
        remove(home, listed)
    assert refused.value.code is ErrorCode.STATE_LOCKED
    assert (home.folder / name).exists()


def test_the_cache_that_a_join_makes_is_deleted_and_suites_of_gym_eval_stay(home: Home) -> None:
    filters = home.folder / "evals" / "filters"
    filters.mkdir(parents=True)
    (filters / "f.json").write_text("{}")
    assert filters.parent in client_files_of(home).files
    (home.folder / "evals" / "suites").mkdir()
    assert filters.parent in client_files_of(home).others


def test_the_uninstall_command_asks_and_removes_an_empty_home(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(home.folder.parent))
    assert home.key.contributor
    asked = run_here(["gym-client", "uninstall", "--home", str(home.folder)])
    assert asked.returncode != 0
    assert (home.folder / "key.pem").exists()
    done = run_here(["gym-client", "uninstall", "--home", str(home.folder), "--yes"])
    assert done.returncode == 0, done.stderr
    assert not home.folder.exists()
