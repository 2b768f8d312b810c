"""The editor of YAML on Train and Tune: a problem leads to its line, the form writes into the text, a draft stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Served

if TYPE_CHECKING:
    from playwright.sync_api import Page

SELECTED = """() => {
    const text = document.getElementById("yaml");
    return text.value.slice(text.selectionStart, text.selectionEnd);
}"""


TEXT = """\
algorithm: sft
model: gym-nano
output_dir: runs/typed
data:
  - {tasks: [double], num_examples: 40}
max_steps: 100
"""


def test_nothing_is_a_problem_before_something_is_chosen(webui: Served, page: Page) -> None:
    page.goto(webui.url)
    with page.expect_response("**/train/check"):
        page.goto(f"{webui.address}/train")
    page.locator("#run-name").wait_for()
    assert page.locator("#problems").inner_text() == ""
    assert page.locator("#main .struck").count() == 0
    page.get_by_role("radio", name="A style").check()
    page.get_by_text("Choose data", exact=True).wait_for()
    assert page.locator("#main .struck").count() == 0


@pytest.mark.parametrize(
    ("screen", "key", "place"), [("train?tab=yaml", "max_steps", "6:1"), ("tune", "num_trials", "14:3")]
)
def test_a_problem_leads_to_its_line(screen: str, key: str, place: str, webui: Served, page: Page) -> None:
    page.goto(webui.url)
    page.goto(f"{webui.address}/{screen}")
    text = page.locator("#yaml")
    if screen.startswith("train"):
        text.fill(TEXT)
    page.get_by_text("Valid", exact=True).wait_for()
    text.fill(text.input_value().replace(f"{key}:", f"{key}x:"))
    page.get_by_text("One problem").wait_for()
    assert page.locator("button.place").inner_text() == place
    if screen.startswith("train"):
        page.get_by_role("tab", name="Choices").click()
    page.locator("button.place").click()
    assert page.evaluate(SELECTED) == f"{key}x"
    assert page.locator(".gutter .bad").inner_text() == place.partition(":")[0]
    page.reload()
    page.get_by_text("One problem").wait_for()  # what was typed stays


def test_the_form_changes_one_value_of_the_text(webui: Served, page: Page) -> None:
    page.goto(webui.url)
    page.goto(f"{webui.address}/train?tab=yaml")
    page.locator("#yaml").fill(TEXT)
    page.get_by_text("Valid", exact=True).wait_for()
    page.get_by_role("tab", name="YAML").press("ArrowLeft")
    page.locator("#key-max_steps").fill("50")
    page.locator("#key-max_steps").press("Enter")
    page.wait_for_function("() => document.getElementById('yaml').value.includes('max_steps: 50')")
    assert page.locator("#yaml").input_value() == TEXT.replace("max_steps: 100", "max_steps: 50")
    page.wait_for_selector(".start button.primary:enabled")
