"""An evening at the workbench: a recipe, a typo, a run that outlives its tab, a chat, a variant, an export."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.browser.conftest import RUN, Served
from tests.support import chromium
from tests.support.wait import SECONDS, until

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., tuple["Page", chromium.Watch]]

SMALL = {
    "runs/nano-sft": "runs/evening",
    "device: auto": "device: cpu",
    "num_examples: 2000": "num_examples: 200",
    "per_device_train_batch_size: 32": "per_device_train_batch_size: 4",
}
"""Changes to the recipe: a run of seconds."""


def curve(page: Page) -> str:
    """The charts of a run in words, as a screen reader has them."""
    return "\n".join(page.locator(".chart .visually-hidden").all_inner_texts())


def test_a_run_shows_the_same_curve_in_a_tab_that_is_opened_later(webui: Served, open_page: Open) -> None:
    seen = []
    for _ in range(2):
        page, _ = open_page()
        page.goto(webui.url)
        page.goto(f"{webui.address}/runs/{RUN}")
        chromium.settled(page)
        until(lambda page=page: "Loss: 13 values" in curve(page), "the curve")
        seen.append(curve(page))
        page.close()
    assert seen[0] == seen[1]


def test_from_a_recipe_with_a_typo_to_an_exported_variant(webui: Served, open_page: Open) -> None:
    page, watch = open_page()
    watch.allowed.append("422.*train/plan")  # on a busy machine the typo is planned, too
    page.goto(webui.url)
    page.goto(f"{webui.address}/train?tab=yaml")
    recipe = page.get_by_label("Start from a recipe")
    value = recipe.locator("option", has_text="nano-sft").first.get_attribute("value")
    recipe.select_option(value)
    text = page.locator("textarea.code").first
    until(lambda: "nano-sft" in text.input_value(), "the recipe")
    written = text.input_value()
    for before, after in SMALL.items():
        assert before in written
        written = written.replace(before, after)
    text.fill(written.replace("max_steps: 100", "max_step: 8"))
    page.locator("#problems").get_by_text("max_steps").first.wait_for()
    text.fill(
        written.replace("max_steps: 100", "max_steps: 8").replace("logging_steps: 10", "logging_steps: 1")
    )
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url("**/runs/evening")
    page.close()

    page, _ = open_page()
    page.goto(webui.url)
    page.goto(f"{webui.address}/runs/evening")
    page.get_by_text("finished").first.wait_for()
    until(lambda: "Loss: 8 values" in curve(page), "the whole curve")

    page.goto(f"{webui.address}/play?a=runs/evening")
    page.get_by_label("Message").fill("reverse: hello")
    page.get_by_role("button", name="Send").click()
    page.get_by_role("button", name="better", exact=False).first.click()
    page.get_by_label("The answer it should have given").fill("OLLEH!")
    page.get_by_role("button", name="Save as the better answer").click()
    page.get_by_role("button", name="Make a variant").click()
    page.get_by_role("button", name="Compare runs/evening with").wait_for()

    page.goto(f"{webui.address}/models")
    page.get_by_role("button", name="Export").first.click()
    page.get_by_role("button", name="Export", exact=True).last.click()
    until(lambda: any((webui.folder / "exports").glob("*/config.json")), "the export", 5 * SECONDS)
