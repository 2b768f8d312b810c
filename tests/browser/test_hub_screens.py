"""The hub's screens in a browser: they follow rounds without a reload, and an operator's buttons do what they say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gym_server.federation import Federation
from gym_server.store.tables import accounts
from gym_server.web.dashboard import Dashboard
from sqlalchemy import update

from gym_fed.trust.identity.login import parse_invite
from tests.support.private_hub import PrivateRounds, private_hub

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

    from tests.support.chromium import Watch

HOSTILE = "<img src=x onerror=alert(1)>"
KEEP = "() => { window.kept = true; }"
IS_KEPT = "() => window.kept === true"


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path) -> Iterator[tuple[PrivateRounds, Dashboard]]:
    """A hub after one round, its dashboard beside it, and a contributor with a hostile name."""
    folder = private_hub(tmp_path / "hub", tiny_base, privacy=None, advertise="hub.example.org:9443")
    with Federation.open(folder) as fed:
        found = PrivateRounds(fed)
        found.run()
        with fed.database.transaction() as tx:
            mine = accounts.c.contributor == found.keys["ann"].contributor
            tx.execute(update(accounts).where(mine).values(name=HOSTILE))
        with Dashboard(fed, "127.0.0.1:0", public=False, is_running=True) as dashboard:
            dashboard.start()
            yield found, dashboard


def opened(page: Page, dashboard: Dashboard, path: str) -> None:
    """A screen that has its data, with its stream open."""
    page.goto(dashboard.url)
    page.goto(dashboard.server.address + path)
    page.wait_for_selector("table")
    page.wait_for_selector('#connection[data-state="live"]')
    page.evaluate(KEEP)


def test_screens_follow_a_round_without_a_reload(hub: tuple[PrivateRounds, Dashboard], page: Page) -> None:
    rounds, dashboard = hub
    seen = {
        "/contributors": "document.querySelectorAll('tbody tr:first-child .strip i').length",
        "/model": "document.querySelectorAll('tbody tr').length",
        "/ledger": "Number(document.querySelector('tbody td.number').textContent.replace(',', ''))",
        f"/contributors/{rounds.keys['bob'].contributor}": "document.querySelectorAll('.marks .strip i').length",
    }
    for path, count in seen.items():
        opened(page, dashboard, path)
        before = page.evaluate(count)
        rounds.run()
        page.wait_for_function(f"() => {count} > {before}")
        assert page.evaluate(IS_KEPT), path


def test_a_pause_is_shown_while_its_last_round_collects(
    hub: tuple[PrivateRounds, Dashboard], page: Page
) -> None:
    _, dashboard = hub

    def paused(route: Route) -> None:
        about = route.fetch().json()
        state = {"server_round": 2, "state": "collecting", "pause": "the hub is paused: lunch"}
        route.fulfill(json={**about, "snapshot": {**about["snapshot"], **state}})

    page.route("**/api/v1/overview", paused)
    page.goto(dashboard.url)
    page.get_by_text("send their updates. The hub is paused: lunch. No round follows").wait_for()


def test_a_hostile_name_is_text_on_every_screen(
    hub: tuple[PrivateRounds, Dashboard], page: Page, watch: Watch
) -> None:
    rounds, dashboard = hub
    for path in ("/contributors", "/ledger", f"/contributors/{rounds.keys['ann'].contributor}"):
        opened(page, dashboard, path)
        assert page.locator("main").get_by_text(HOSTILE).count() >= 1, path
        assert page.locator("main img").count() == 0


def test_an_operator_creates_an_invite_that_is_shown_once_and_cancels_it(
    hub: tuple[PrivateRounds, Dashboard], page: Page
) -> None:
    _, dashboard = hub
    page.goto(dashboard.url)
    page.goto(f"{dashboard.server.address}/invites")
    page.get_by_label("Note").fill(HOSTILE)
    page.get_by_role("button", name="Create an invite").click()
    page.get_by_role("img", name="The invite as a QR code").wait_for()
    message, link = page.locator(".invite code").all_text_contents()
    assert link in message
    token = parse_invite(link).token
    page.locator("td").get_by_text(HOSTILE).wait_for()  # the one row of it
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("cancelled", exact=True).wait_for()
    page.reload()
    page.get_by_text("cancelled", exact=True).wait_for()
    assert token not in page.content()


def test_an_operator_revokes_a_key_with_a_reason_by_the_keyboard(
    hub: tuple[PrivateRounds, Dashboard], page: Page
) -> None:
    rounds, dashboard = hub
    opened(page, dashboard, f"/contributors/{rounds.keys['cat'].contributor}")
    page.get_by_role("button", name="Revoke the key").focus()
    page.keyboard.press("Enter")
    page.keyboard.type("lost laptop")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Bind another key").wait_for()
    (entry,) = rounds.entries("revoked")
    assert (entry["reason"], entry["by"]) == ("lost laptop", "coordinator")


def test_the_proof_of_an_entry_is_shown_and_is_valid(
    hub: tuple[PrivateRounds, Dashboard], page: Page
) -> None:
    _, dashboard = hub
    opened(page, dashboard, "/ledger")
    page.get_by_role("button", name="Proof of entry 2", exact=True).click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("Valid: the hub signed a head").wait_for()
    with page.expect_download() as download:
        dialog.get_by_text("Download the proof").click()
    assert download.value.suggested_filename == "entry-2-proof.json"
    page.keyboard.press("Escape")
    assert page.get_by_role("dialog").count() == 0
