"""`gym-client ui`: an invite is pasted, terms are read, the machine contributes, pauses, and leaves; no terminal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from gym_client.agent.pauses import is_paused
from gym_client.agent.policy import Policy
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.pins import ServerPin
from gym_client.web.app import open_ui

from gym_fed.trust.identity.login import Invite, format_invite
from tests.browser.conftest import Served
from tests.support import chromium
from tests.support.hub import HubProcess
from tests.support.wait import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

Open = Callable[..., tuple["Page", chromium.Watch]]
HOSTILE = "<img src=x onerror=alert(1)>"
LINK = format_invite(Invite("hub.example.org", 9443, f"sha256:{'a' * 64}", "b" * 32))
ACCOUNT = {"balance": 7, "server_round": 3, "round_state": "open", "bytes_up": 9, "bytes_down": 9}
ROUNDS = [
    {"server_round": 2, "update": "f2", "verdict": "merged", "score": 0.02, "error": 0.01, "credit": 4},
    {"server_round": 1, "update": "f1", "verdict": "merged", "score": -0.01, "error": 0.01, "credit": 3},
]


@pytest.fixture(scope="module")
def member(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The page of a home that has joined a hub with a hostile name; nothing answers at its address."""
    home = Home.open(tmp_path_factory.mktemp("member") / "home")
    address = Address.parse("127.0.0.1:9")
    key = f"sha256:{'a' * 64}"
    pin = ServerPin(address=str(address), fingerprint=key, certificate_pem="", contributor="c1", name=HOSTILE)
    pin.save(home, address)
    home.remember(server=str(address))
    server, _ = open_ui(home, "127.0.0.1:0")
    server.start()
    yield Served(server.address, server.url, home.folder, {})
    server.stop()


def opened(page: Page, served: Served) -> None:
    verdicts = [{**row, "bytes": 5, "reason": HOSTILE} for row in ROUNDS]
    page.route("**/join/account*", lambda route: route.fulfill(json={**ACCOUNT, "verdicts": verdicts}))
    page.route("**/join/rewards*", lambda route: route.fulfill(json={"rounds": ROUNDS, "reputation": 0.5}))
    page.goto(served.url)
    chromium.settled(page)


def test_a_member_sees_what_was_earned_with_its_error_and_no_name_is_html(member: Served, page: Page) -> None:
    opened(page, member)
    page.get_by_text("+0.0200 ± 0.01").wait_for()
    chart = page.get_by_role("group", name="Your contribution").first
    chart.locator(".value").get_by_text("± 0.01").wait_for()
    assert page.locator("#main img").count() == 0
    assert page.get_by_role("heading", name=HOSTILE).count() == 1
    for theme, width, picture in chromium.looks(page):
        assert chromium.most_colourful(picture) <= chromium.MOST_APART, (theme, width)
        assert chromium.sticks_out(page) == [], (theme, width)


JOB = {"id": "20261130-000000-0a0b0c0d", "command": ["gym-client", "join"], "stops": 0, "started_at": 1}
JOINED = {"at": 1, "event": "joined", "message": "joined our hub"}
STOPPED = {"error": {"code": "interrupted", "message": "stopped", "hint": "run the same command again"}}
SENT = {"at": 2, "event": "receipt", "verdict": "admitted", "message": "receipt: admitted update f3"}
WAITING = {"at": 3, "event": "waiting", "message": "waiting for a task"}


def with_job(page: Page, status: str, *lines: dict[str, Any]) -> None:
    """Let the page have a job that printed these lines."""
    job, text = (
        {**JOB, "status": status, "exit_code": None},
        "".join(json.dumps(line) + "\n" for line in lines),
    )
    begun = re.compile("/api/v1/join$")
    page.route(begun, lambda route: route.fulfill(json={**route.fetch().json(), "job": job}))
    page.route(f"**/jobs/{job['id']}", lambda route: route.fulfill(json=job))
    output = {"text": text, "next": len(text), "size": len(text)}
    page.route(f"**/jobs/{job['id']}/output*", lambda route: route.fulfill(json=output))


def test_a_stop_is_not_a_failure_and_the_balance_stays_while_it_is_read_again(
    member: Served, page: Page
) -> None:
    with_job(page, "ended", JOINED, STOPPED)
    opened(page, member)
    page.get_by_text("continues at its last checkpoint").wait_for()
    assert page.get_by_text("did not work").count() == 0
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/join/account*", hold)
    page.get_by_role("button", name="Pause").click()
    page.get_by_role("button", name="Resume").wait_for()
    until(lambda: bool(page.evaluate("1") and held), "the balance is asked for again")
    assert page.locator(".figure", has_text="Balance").inner_text().split() == ["Balance", "7", "credits"]
    held[0].fulfill(json={**ACCOUNT, "verdicts": []})
    page.get_by_role("button", name="Resume").click()
    page.get_by_role("button", name="Pause").wait_for()


def test_a_slow_step_keeps_the_bar_of_its_phase_and_the_last_words_are_not_the_first(
    member: Served, page: Page
) -> None:
    step = {
        "at": 2,
        "event": "progress",
        "phase": "train",
        "done": 3,
        "total": 60,
        "loss": 0.5,
        "seconds": 9.0,
    }
    with_job(page, "running", JOINED, step)
    opened(page, member)
    page.get_by_role("progressbar", name="Training").wait_for()
    with_job(
        page, "running", JOINED, step, {"event": "done", "finished": False, "num_submitted": 1, "balance": 5}
    )
    page.reload()
    page.get_by_text("Ending").wait_for()
    assert page.get_by_text("Starting").count() == 0


def test_who_has_sent_an_update_sees_what_it_waits_for(member: Served, page: Page) -> None:
    with_job(page, "running", JOINED, SENT, WAITING)
    opened(page, member)
    page.get_by_text("Its verdict follows when enough others have sent theirs").wait_for()


def test_the_keyboard_alone_pauses_and_sets_hours(member: Served, page: Page) -> None:
    opened(page, member)
    home = Home(member.folder)
    page.get_by_role("button", name="Pause").press("Enter")
    page.get_by_role("button", name="Resume").wait_for()
    assert is_paused(home)
    page.get_by_role("button", name="Resume").press("Enter")
    page.get_by_role("button", name="Pause").wait_for()
    page.locator("summary", has_text="Works at any time").press("Enter")
    page.get_by_role("button", name="Only at certain hours").press("Enter")
    page.get_by_label("To, span 1").fill("06:30")
    page.get_by_role("button", name="Save").press("Enter")
    page.locator("summary", has_text="Works 22:00-06:30").wait_for()
    assert Policy.load(home.policy_path).hours == ["22:00-06:30"]


def test_a_pasted_message_shows_whose_invite_it_holds(client: Served, page: Page) -> None:
    page.goto(client.url)
    chromium.settled(page)
    field = page.locator("#invite")
    field.fill(f"You are invited.\nPaste this: {LINK} (works once)")
    page.get_by_text("From hub.example.org:9443").wait_for()
    field.fill(LINK[:-3])
    page.get_by_text("This invite is incomplete").wait_for()
    field.fill("see you on monday")
    page.get_by_text("There is no invite in this text").wait_for()


def test_the_file_that_the_command_opens_in_a_browser_logs_in(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uris: list[str] = []
    monkeypatch.setattr("webbrowser.open", uris.append)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    server, _ = open_ui(Home.open(tmp_path / "home"), "127.0.0.1:0")
    server.start()
    page = browser.new_page()  # without a watch, which reports a request for a file
    try:
        server.open_browser()
        page.goto(uris[0])
        page.get_by_role("button", name="See the terms").wait_for()
        assert page.url == f"{server.address}/"
        assert not list(tmp_path.glob("gym-login-*"))
    finally:
        page.close()
        server.stop()


def test_a_link_that_opened_the_page_is_shown_for_consent_and_nothing_starts(
    tmp_path: Path, page: Page
) -> None:
    hostile = f"{LINK[:-3]} {HOSTILE}"
    server, jobs = open_ui(Home.open(tmp_path / "home"), "127.0.0.1:0", invite=hostile)
    server.start()
    try:
        page.goto(server.url)
        chromium.settled(page)
        assert page.locator("#invite").input_value() == hostile
        page.get_by_text("This invite came from a link").wait_for()
        page.get_by_text("This invite is incomplete").wait_for()
        assert page.locator("#main img").count() == 0
        assert jobs.list() == []
        page.locator("summary", has_text="Open invites with a click").press("Enter")
        page.get_by_role("button", name="Open invites with this page").wait_for()
    finally:
        server.stop()


@pytest.mark.slow
def test_an_invite_leads_to_a_merged_update_and_the_work_outlives_the_page(
    tmp_path: Path, open_page: Open
) -> None:
    hub = HubProcess(
        tmp_path / "hub",
        {
            "rounds": {"num_rounds": 50, "min_contributors": 1},
            "recipe": {"max_steps": 2, "max_length": 64},
            "soup": {"aggregator": "mean", "num_malicious_nodes": 0},
        },
    ).start()
    home = Home.open(tmp_path / "home")
    (tmp_path / "rows.csv").write_text(
        "question,answer\n" + "".join(f"double: w{n},w{n}w{n}\n" for n in range(40))
    )
    first, jobs = open_ui(home, "127.0.0.1:0")
    try:
        first.start()
        page, watch = open_page()
        # On a busy machine, the page looks once more for its server, which has ended.
        watch.allowed.append("ERR_CONNECTION_REFUSED.*/session")
        page.goto(first.url)
        chromium.settled(page)
        page.locator("#invite").fill(format_invite(Invite("127.0.0.1", hub.port, hub.fingerprint, "")))
        page.locator("#rows-file").set_input_files(tmp_path / "rows.csv")
        page.wait_for_function("() => document.getElementById('data').value === 'data/rows.csv'")
        page.get_by_role("button", name="See the terms").click()
        page.get_by_role("button", name="Use these columns").click()
        page.get_by_role("button", name="Join on these terms").click()
        page.get_by_role("cell", name="merged").first.wait_for()
        page.goto("about:blank")
        first.stop()

        second, jobs = open_ui(home, "127.0.0.1:0")
        second.start()
        assert next(job.status for job in jobs.list() if job.command[1] == "join") == "running"
        page.goto(second.url)
        page.get_by_role("button", name="Stop").click()
        page.get_by_role("button", name="Continue").wait_for()
        page.on("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Leave").click()
        page.get_by_text("left").first.wait_for()
        until(lambda: all(job.status == "ended" for job in jobs.list()), "the end of all jobs")
        page.goto(f"{second.address}/uninstall")
        page.get_by_role("button", name="Delete").click()
        page.get_by_text("this page has ended").wait_for()
        assert not home.folder.exists()
        second.stop()
    finally:
        for job in jobs.list():
            jobs.stop(job.id)
        hub.stop()
    receipts = json.dumps(hub.ask("accounts", "--json"))
    assert "left" in receipts
