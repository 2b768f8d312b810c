"""What holds for every screen of both faces: no colour, no overflow, no barrier, a small first view, no stranger."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Served
from tests.support import chromium
from tests.support.screens import FACES, Screen, screens

if TYPE_CHECKING:
    from playwright.sync_api import Page

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")
MOST_REQUESTS, MOST_BYTES = 10, 150_000


def keep(picture: bytes, name: str) -> None:
    """Write a picture into the folder ``GYM_SHOTS``, for people to look at."""
    if folder := os.environ.get("GYM_SHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.png").write_bytes(picture)


def test_both_lists_of_screens_are_read() -> None:
    assert {screen.face for screen in screens()} == FACES.keys()
    assert len(screens()) > 20


@pytest.mark.parametrize("screen", screens(), ids=str)
def test_a_screen_is_grey_fits_its_window_has_no_barrier_and_a_small_first_view(
    screen: Screen, page: Page, watch: chromium.Watch, request: pytest.FixtureRequest
) -> None:
    served: Served = request.getfixturevalue(screen.face)
    address = served.address + screen.url(served.parameters)
    page.goto(served.url)
    page.goto("about:blank")  # what that page still fetches ends with it, and is not counted
    watch.forget()
    page.context.new_cdp_session(page).send("Network.clearBrowserCache")
    page.goto(address)
    chromium.settled(page)
    page.wait_for_timeout(200)
    assert len(watch.requests) <= MOST_REQUESTS, watch.requests
    assert watch.num_bytes <= MOST_BYTES
    assert page.locator("#main .state.failed").count() == 0, page.inner_text("#main")
    page.evaluate(AXE)
    for theme, width, picture in chromium.looks(page):
        keep(picture, f"{screen.face}-{screen.module}-{theme}-{width}")
        assert chromium.most_colourful(picture) <= chromium.MOST_APART, (theme, width)
        assert chromium.sticks_out(page) == [], (theme, width)
        if width == max(chromium.WIDTHS):
            assert chromium.violations(page) == [], theme
    assert chromium.unreached_by_keyboard(page) == []


@pytest.mark.parametrize("query", ["a=gym-nano", "a=gym-nano&b=runs/nano-sft"])
def test_a_link_to_a_conversation_has_a_small_first_view_even_with_taught_answers(
    query: str, webui: Served, page: Page, watch: chromium.Watch
) -> None:
    taught = webui.folder / "taught"
    taught.mkdir(exist_ok=True)
    row = {"prompt": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "b"}
    (taught / "gym-nano.jsonl").write_text(json.dumps(row) + "\n")
    page.route("**/play/serve", lambda route: route.fulfill(json={"servers": []}))  # no model is loaded
    page.goto(webui.url)
    page.goto("about:blank")
    watch.forget()
    page.context.new_cdp_session(page).send("Network.clearBrowserCache")
    page.goto(f"{webui.address}/play?{query}")
    chromium.settled(page)
    page.get_by_text("Taught to gym-nano").wait_for()
    page.wait_for_timeout(200)
    assert len(watch.requests) <= MOST_REQUESTS, watch.requests
    assert watch.num_bytes <= MOST_BYTES
    page.locator("summary", has_text="Taught to gym-nano").press("Enter")
    page.get_by_role("button", name="Make a variant").wait_for()


def test_a_control_that_the_tab_key_never_reaches_or_that_looks_the_same_is_found(page: Page) -> None:
    page.set_content(
        "<button style='outline:none'>a</button><div inert><button>b</button></div><button>c</button>"
    )
    assert set(chromium.unreached_by_keyboard(page)) == {
        "not reached: <button>b</button>",
        'no focus ring: <button style="outline:none">a</button>',
    }


def test_a_narrow_window_shows_which_screen_is_open(hub: Served, page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 800})
    page.goto(hub.url)
    page.goto(f"{hub.address}/health")
    chromium.settled(page)
    box = page.locator("nav a[aria-current=page]").bounding_box()
    assert box is not None
    assert 0 <= box["x"] <= box["x"] + box["width"] <= 360
