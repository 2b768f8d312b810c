"""A file whose columns no format knows: two drop-downs above its rows, and what is chosen goes on to training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Served
from tests.support import chromium
from tests.support.wait import until

if TYPE_CHECKING:
    from playwright.sync_api import Page

Open = Callable[..., tuple["Page", chromium.Watch]]
ROWS = 'Customer question,"Answer, ours",Note\n' + "".join(
    f"How is lamp {number} reset?,Hold the button of lamp {number} for five seconds.,a longer remark of lamp {number}\n"
    for number in range(12)
)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Served]:
    """A workbench whose folder holds one file of rows."""
    from gym_fed.webui.app import open_webui
    from gym_fed.webui.workbench import open_workbench

    (tmp_path / "tickets.csv").write_text(ROWS, encoding="utf-8")
    server = open_webui(open_workbench(tmp_path, tmp_path / "runs"), "127.0.0.1:0", "bench")
    server.start()
    yield Served(server.address, server.url, tmp_path, {"name": "tickets.csv"})
    server.stop()


def test_question_and_answer_are_chosen_above_the_rows_and_trained_on(bench: Served, open_page: Open) -> None:
    page, _ = open_page()
    page.goto(bench.url)
    page.goto(f"{bench.address}/data/tickets.csv")
    question, answer = page.get_by_label("Question", exact=True), page.get_by_label("Answer", exact=True)
    assert question.input_value() == "Customer question"
    assert answer.input_value() == "Answer, ours"
    answer.select_option("Customer question")
    page.get_by_role("form", name="Columns").get_by_role("button", name="Use these columns").click()
    assert not answer.evaluate("control => control.validity.valid"), "one column is not both"
    answer.select_option("Note")
    page.get_by_role("form", name="Columns").get_by_role("button", name="Use these columns").click()
    page.locator(".datarow .lit", has_text="a longer remark of lamp 0").first.wait_for()
    answer.select_option("Answer, ours")
    page.get_by_role("form", name="Columns").get_by_role("button", name="Use these columns").click()
    page.locator(".datarow .lit", has_text="Hold the button of lamp 0").first.wait_for()
    assert page.locator(".datarow p.problem").count() == 0
    page.get_by_role("link", name="Train on these rows").click()
    text = page.locator("textarea.code").first
    until(lambda: "tickets.csv" in text.input_value(), "the rows in the configuration")
    assert "columns: {prompt: Customer question, completion: 'Answer, ours'}" in text.input_value()
