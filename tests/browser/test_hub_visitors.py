"""Who looks at a hub: a viewer changes nothing, and what contributors write stays text."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gym_server.federation import Federation
from gym_server.web.dashboard import Dashboard

from gym_fed.web.access import KEYS_NAME, WebKeys
from tests.browser.conftest import Served
from tests.support import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = '<img src=x onerror="window.ran=1"><script>window.ran=1</script>'
POST = """async (path) => {
  const {session} = await import("/static/app.js");
  const headers = {"Content-Type": "application/json", "X-CSRF-Token": session.csrf};
  return (await fetch(path, {method: "POST", headers, body: "{}"})).status;
}"""


def test_a_viewer_looks_and_its_posts_are_refused(hub: Served, page: Page, watch: chromium.Watch) -> None:
    watch.allowed.append("403")
    key = WebKeys(hub.folder / "keys" / KEYS_NAME).add("vera", "viewer")
    page.goto(f"{hub.address}/login")
    page.get_by_label("Key, or the token").fill(key)
    page.keyboard.press("Enter")
    page.wait_for_selector("#connection[data-state=live]")
    assert page.locator(".role").inner_text() == "viewer"
    for path in ("/api/v1/logout", "/api/v1/invites"):
        assert page.evaluate(POST, path) == 403, path


@pytest.fixture
def hostile_hub(played: Path, tmp_path: Path) -> Iterator[Served]:
    """A hub whose contributors' names, and the reasons of its verdicts, are markup and long words."""
    folder = tmp_path / "hub"
    shutil.copytree(played, folder)
    with closing(sqlite3.connect(folder / "hub.db")) as database:
        database.execute("update accounts set name = ?", (HOSTILE.ljust(80, "W"),))
        database.execute("update updates set reason = ?", (HOSTILE.ljust(300, "W"),))
        (contributor,) = database.execute("select contributor from accounts limit 1").fetchone()
        database.commit()
    with Federation.open(folder) as fed:
        dashboard = Dashboard(fed, "127.0.0.1:0", public=False, is_running=False)
        dashboard.start()
        yield Served(dashboard.server.address, dashboard.url, folder, {"id": contributor})
        dashboard.stop()


def test_markup_in_names_and_reasons_is_shown_as_text_on_every_screen(
    hostile_hub: Served, page: Page
) -> None:
    page.goto(hostile_hub.url)
    chromium.settled(page)
    for path in (
        "/",
        "/rounds",
        "/rounds/1",
        "/contributors",
        f"/contributors/{hostile_hub.parameters['id']}",
    ):
        page.goto(hostile_hub.address + path)
        chromium.settled(page)
        assert page.evaluate("() => window.ran") is None, path
        assert page.locator("#main img, #main script").count() == 0, path
        if path not in ("/", "/rounds"):  # where no name and no reason stands after the last round
            assert "<img" in page.inner_text("#main"), path
        for width in chromium.WIDTHS:
            page.set_viewport_size({"width": width, "height": chromium.HEIGHT})
            assert chromium.sticks_out(page) == [], (path, width)
