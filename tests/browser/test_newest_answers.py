"""The newest version's answers in a browser: hostile text stays text, and a round's change shows without a reload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from gym_server.federation import Federation
from gym_server.web.dashboard import Dashboard

from tests.support import chromium
from tests.support.fake_model import FakeModel
from tests.support.private_hub import PrivateRounds, private_hub

if TYPE_CHECKING:
    from playwright.sync_api import Page

HOSTILE = "<img src=x onerror=alert(1)>"
Hub = tuple[PrivateRounds, Dashboard, FakeModel]


@pytest.fixture
def hub(tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that everybody may look at, whose newest version answers without a model."""
    model = FakeModel(monkeypatch)
    config = {"ask": True, "prompts": ["What is a soup?", HOSTILE]}
    folder = private_hub(tmp_path / "hub", tiny_base, privacy=None, dashboard=config)
    with (
        Federation.open(folder) as fed,
        Dashboard(fed, "127.0.0.1:0", public=True, is_running=True) as dashboard,
    ):
        dashboard.start()
        yield PrivateRounds(fed), dashboard, model
    model.close()


def test_an_operator_sees_what_a_round_changed_and_has_a_question_answered(hub: Hub, page: Page) -> None:
    rounds, dashboard, model = hub
    page.goto(dashboard.url)
    page.goto(f"{dashboard.server.address}/model")
    page.get_by_text("Version 0, the base, is ready").wait_for()
    page.wait_for_selector('#connection[data-state="live"]')
    assert page.locator(".prompted .answer").count() == 2
    model.answer = HOSTILE
    rounds.run()
    page.get_by_text("Version 1 is ready").wait_for()
    answers = page.locator(".prompted .answer .said")
    assert answers.all_text_contents() == [HOSTILE, "an answer"] * 2
    assert page.locator("main img").count() == 0
    page.get_by_label("Ask the newest version").fill("hello")
    page.keyboard.press("Enter")
    page.locator("form .answer .said").get_by_text(HOSTILE).wait_for()
    for theme, width, picture in chromium.looks(page):
        assert chromium.most_colourful(picture) <= chromium.MOST_APART, (theme, width)
        assert chromium.sticks_out(page) == [], (theme, width)


def test_a_viewer_sees_the_answers_and_has_no_box(hub: Hub, page: Page) -> None:
    _, dashboard, _ = hub
    page.goto(f"{dashboard.server.address}/model")
    page.get_by_text("is ready").wait_for()
    page.locator(".chart .none").get_by_text("this hub has no held-out rows").wait_for()
    assert page.locator(".prompted .said").first.text_content() == "What is a soup?"
    assert page.get_by_role("textbox").count() == 0
