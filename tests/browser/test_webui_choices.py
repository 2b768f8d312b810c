"""A stranger with a file of rows: three choices, a start, the first point, and what was gained."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser.conftest import Served
from tests.support import chromium
from tests.support.wait import SECONDS, until

if TYPE_CHECKING:
    from playwright.sync_api import Page, Route

Open = Callable[..., tuple["Page", chromium.Watch]]
NAME = f"<img src=x onerror=alert(1)> {'long-' * 12}tickets.csv"
PLAN = {
    "weights": 9,
    "trained": 9,
    "device": "cpu",
    "memory": {},
    "peak_bytes": 10**9,
    "available_bytes": 8 * 10**9,
    "steps": 6,
    "seconds_per_step": 2.0,
}
"""A plan, which takes a process with torch; test_train_choices.py makes a real one."""
ROWS = "Customer question,Our reply\n" + "".join(f"double: w{n},w{n}w{n}\n" for n in range(24))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Served]:
    """A workbench in an empty folder."""
    from gym_fed.webui.app import open_webui
    from gym_fed.webui.workbench import open_workbench

    workbench = open_workbench(tmp_path, tmp_path / "runs")
    server = open_webui(workbench, "127.0.0.1:0", "bench")
    server.start()
    yield Served(server.address, server.url, tmp_path, {})
    for job in workbench.jobs.list():
        workbench.jobs.stop(job.id)
    server.stop()


def drop(page: Page, name: str, content: str) -> None:
    """Drop a file on the page, as from a file manager."""
    page.evaluate(
        """([name, content]) => {
          const data = new DataTransfer();
          data.items.add(new File([content], name));
          const event = new DragEvent("drop", {dataTransfer: data, bubbles: true, cancelable: true});
          document.querySelector(".drop").dispatchEvent(event);
        }""",
        [name, content],
    )


def text(page: Page) -> str:
    return page.locator("#yaml").input_value()


@pytest.mark.slow  # a whole run with its check
def test_from_a_dropped_file_to_what_was_gained(bench: Served, open_page: Open) -> None:
    page, _ = open_page()
    page.route("**/api/v1/train/plan", lambda route: route.fulfill(json=PLAN))
    page.route("**/api/v1/train/memory", lambda route: route.fulfill(json={"gym-nano": PLAN}))
    page.goto(bench.url)
    page.get_by_role("heading", name="1 Model").wait_for()
    page.set_viewport_size({"width": 360, "height": 800})
    drop(page, NAME.replace("<", "").replace(">", ""), ROWS)
    page.locator(".datarow .lit", has_text="w0w0").first.wait_for()
    assert chromium.sticks_out(page) == []
    page.set_viewport_size({"width": 1440, "height": 900})
    assert "columns: {prompt: Customer question, completion: Our reply}" in text(page)
    page.locator("#goal-style").check()
    until(lambda: "algorithm: pretrain" in text(page), "the goal in the YAML")
    page.locator("#goal-answers").check()
    until(lambda: "algorithm: sft" in text(page), "the goal in the YAML")
    page.locator(".estimate").get_by_text("about 12 s, 1.0 GB of 8.0 GB").wait_for()
    page.locator(".option", has_text="1.0 GB of memory").wait_for()
    page.get_by_role("tab", name="YAML").click()
    page.locator("#yaml").fill(text(page) + "max_steps: 6\nper_device_train_batch_size: 4\ndevice: cpu\n")
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url("**/runs/my-run")
    charts = page.locator(".chart .visually-hidden")
    until(lambda: "Loss: " in "\n".join(charts.all_inner_texts()), "the first point")
    page.get_by_role("heading", name="What was gained and what was lost").wait_for(timeout=1000 * SECONDS)
    page.get_by_text("Held-out loss").first.wait_for()
    assert page.locator(".prompted").count() == 3
    for name in ("Chat", "Compare with its base", "Share", "Export"):
        assert page.get_by_role("link", name=name, exact=True).is_visible()
    page.get_by_role("button", name="Continue").click()
    page.get_by_role("tab", name="Choices").wait_for()
    assert "model: runs/my-run\noutput_dir: runs/my-run-2\n" in text(page)


def test_the_yaml_and_the_choices_say_the_same(bench: Served, open_page: Open) -> None:
    (bench.folder / "pairs.jsonl").write_text(
        "".join(json.dumps({"prompt": f"p{n}", "chosen": "yes", "rejected": "no"}) + "\n" for n in range(5))
    )
    page, _ = open_page()
    page.route("**/api/v1/train/plan", lambda route: route.fulfill(json=PLAN))
    page.route("**/api/v1/train/memory", lambda route: route.fulfill(json={"gym-nano": PLAN}))
    page.goto(bench.url)
    page.locator("#rows-here").select_option("pairs.jsonl")
    until(lambda: "algorithm: dpo" in text(page), "preferences, since the rows are pairs")
    until(lambda: page.locator("#goal-preferences").is_checked(), "the goal of the rows")
    page.get_by_role("tab", name="YAML").click()
    page.locator("#yaml").fill("algorithm: grpo\nmodel: ./other\ngraders: [{grader: numeric}]\n")
    page.get_by_role("tab", name="Choices").click()
    until(lambda: page.locator("#goal-reward").is_checked(), "the goal of the text")
    assert page.locator("#grader").input_value() == "numeric"
    assert page.get_by_role("radio", name="./other").is_checked()
    page.get_by_role("radio", name="gym-nano").check()
    until(lambda: "model: gym-nano\n" in text(page), "the model in the text")


def test_an_adapter_is_chosen_with_its_base_and_given_up_again(bench: Served, open_page: Open) -> None:
    (bench.folder / "tuned").mkdir()
    (bench.folder / "tuned" / "adapter_config.json").write_text('{"base_model_name_or_path": "gym-nano"}')
    page, _ = open_page()
    page.route("**/api/v1/train/memory", lambda route: route.fulfill(json={"gym-nano": PLAN}))
    page.goto(bench.url)
    page.get_by_text("adapter of gym-nano").wait_for()
    page.locator("#model-tuned").check()
    until(lambda: "model: gym-nano\n" in text(page) and "adapter: tuned\n" in text(page), "both keys")
    assert page.locator("#model-tuned").is_checked()
    page.locator("#model-gym-nano").check()
    until(lambda: "adapter" not in text(page), "no adapter in the text")


def test_a_long_run_is_cut_to_a_time_and_made_whole_again(bench: Served, open_page: Open) -> None:
    (bench.folder / "rows.csv").write_text(ROWS)
    page, _ = open_page()

    def planned(route: Route) -> None:
        given = re.search(r"^max_steps: (\d+)$", route.request.post_data_json["text"], re.MULTILINE)
        route.fulfill(json={**PLAN, "steps": int(given[1]) if given else 150, "seconds_per_step": 70.0})

    page.route("**/api/v1/train/plan", planned)
    page.route("**/api/v1/train/memory", lambda route: route.fulfill(json={"gym-nano": PLAN}))
    page.goto(bench.url)
    page.locator("#rows-here").select_option("rows.csv")
    page.locator(".estimate").get_by_text("about 2 h 55 min").wait_for()
    length = page.get_by_label("Length")
    assert length.locator("option").all_inner_texts() == [
        "all rows: 2 h 55 min",
        "at most 10 minutes: 8 steps",
        "at most 30 minutes: 25 steps",
        "at most 2 hours: 102 steps",
    ]
    length.focus()
    length.select_option("at most 10 minutes: 8 steps")
    page.locator(".estimate").get_by_text("about 9 min 20 s").wait_for()
    assert page.evaluate("document.activeElement.id") == "run-length"  # it was drawn again
    assert "max_steps: 8\n" in text(page)
    length.select_option("all rows")
    page.locator(".estimate").get_by_text("about 2 h 55 min").wait_for()
    assert "max_steps" not in text(page)


def test_an_estimate_shows_the_memory_before_the_time_and_how_long_it_takes(
    bench: Served, open_page: Open
) -> None:
    (bench.folder / "rows.csv").write_text(ROWS)
    page, _ = open_page()
    held: dict[bool, Route] = {}
    page.route(
        "**/api/v1/train/plan", lambda route: held.update({route.request.post_data_json["timed"]: route})
    )
    page.route("**/api/v1/train/memory", lambda route: route.fulfill(json={"gym-nano": PLAN}))
    page.goto(bench.url)
    page.locator("#rows-here").select_option("rows.csv")
    estimate = page.locator(".estimate")
    estimate.get_by_text(re.compile(r"^Reading the model and the rows, \d s$")).wait_for()
    held[False].fulfill(json={**PLAN, "seconds_per_step": None})
    estimate.get_by_text("1.0 GB of 8.0 GB").wait_for()
    estimate.get_by_text("Timing a step on this machine").wait_for()
    assert "time not known" not in estimate.inner_text()
    until(lambda: page.evaluate("1") and True in held, "the request of the time")
    held[True].fulfill(json=PLAN)
    estimate.get_by_text("about 12 s, 1.0 GB of 8.0 GB").wait_for()
    assert "Timing" not in estimate.inner_text()


def test_the_file_is_chosen_by_the_keyboard_and_its_place_is_said(bench: Served, open_page: Open) -> None:
    (bench.folder / "mine.csv").write_text(ROWS)
    page, _ = open_page()
    page.route("**/api/v1/train/plan", lambda route: route.fulfill(json=PLAN))
    page.route("**/api/v1/train/memory", lambda route: route.fulfill(json={"gym-nano": PLAN}))
    page.goto(bench.url)
    page.locator(".option", has_text="of memory").first.wait_for()  # the last part that is drawn by itself
    page.locator("#find-model").focus()
    passed = []
    while "rows-file" not in passed and len(passed) < 9:
        page.keyboard.press("Tab")
        passed.append(page.evaluate("document.activeElement.id"))
    assert passed[-1] == "rows-file", passed
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Space")
    chooser.value.set_files(bench.folder / "mine.csv")
    page.locator(".drop").get_by_text("mine.csv is stored as data/mine.csv.").wait_for()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("program.py", "print()", "this file type has no rows"),
        ("empty.jsonl", "", "is empty"),
        ("broken.jsonl", '{"prompt": "a", \n', "broken.jsonl"),
        ("numbers.csv", "a,b\n1,2\n3,4\n", "no known format has the columns"),
    ],
)
def test_a_bad_file_is_named_with_a_remedy_and_cannot_be_started(
    bench: Served, open_page: Open, name: str, content: str, said: str
) -> None:
    page, watch = open_page()
    watch.allowed.append("status of 4")  # the refusal of the file
    page.goto(bench.url)
    page.locator(".drop").wait_for()
    drop(page, name, content)
    page.locator(".problem, .problem-list", has_text=said).first.wait_for()
    assert page.get_by_role("button", name="Start", exact=True).is_disabled()


def test_on_a_phone_long_names_wrap_and_the_plan_says_what_the_rows_chose(
    bench: Served, open_page: Open
) -> None:
    (bench.folder / "rows.csv").write_text(ROWS)
    page, _ = open_page()
    rows = {"num_train_epochs": 8, "per_device_train_batch_size": 4}
    page.route("**/api/v1/train/plan", lambda route: route.fulfill(json={**PLAN, "by_rows": rows}))
    page.route("**/api/v1/train/memory", lambda route: route.fulfill(json={"gym-nano": PLAN}))

    def checked(route: Route) -> None:
        chosen = [{"key": key, "value": "by the rows", "reason": ""} for key in (*rows, "max_length")]
        route.fulfill(json={**route.fetch().json(), "chosen": chosen})

    page.route("**/api/v1/train/check", checked)
    page.goto(bench.url)
    page.locator("#rows-here").select_option("rows.csv")
    page.locator(".estimate").get_by_text("about 12 s").wait_for()
    page.locator("summary", has_text="How it is made up").click()
    shown = page.locator(".estimate .facts").inner_text().split("\n")
    assert [shown[shown.index(key) + 1] for key in (*rows, "max_length")] == ["8", "4", "by the rows"]
    page.get_by_label("Find a model").fill("models/SmolLM2-135M-Instruct-and-more-of-its-name")
    page.get_by_role("button", name="Take").wait_for()
    page.set_viewport_size({"width": 360, "height": 800})
    assert chromium.sticks_out(page) == []


def test_text_of_an_older_program_gets_its_remedy_and_the_file_keeps_its_name(
    bench: Served, open_page: Open
) -> None:
    (bench.folder / "kunden.csv").write_bytes("Frage,Antwort\nWie groß?,Sehr groß\n".encode("cp1252"))
    page, watch = open_page()
    watch.allowed.append("status of 422")
    page.goto(bench.url)
    page.locator("#rows-here").select_option("kunden.csv")
    failed = page.locator(".state.failed")
    failed.get_by_text("in Excel: CSV UTF-8").wait_for()
    assert failed.locator("p").inner_text().startswith("kunden.csv: not UTF-8 near line 2. Save the file")
    problem = page.locator("#problems .shape")
    problem.get_by_text("One problem").wait_for()
    assert problem.evaluate("node => getComputedStyle(node).textDecorationLine") == "none"
