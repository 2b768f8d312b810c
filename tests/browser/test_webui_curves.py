"""Charts of a run: across steps, tokens and time, values by mouse and keyboard, zoom, and what an empty one says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gym_fed.training.run.folder import FolderLock
from tests.browser.conftest import Served
from tests.support import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Page

STEPS = (1, *range(10, 101, 10))


def make_run(folder: Path, steps: tuple[int, ...], *, tokens: int = 50) -> None:
    """Write the folder of a run that has not ended: an epoch has 40 steps, a step takes 2 seconds."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"model: gym-nano\noutput_dir: runs/{folder.name}\nnum_train_epochs: 3\n"
    )
    (folder / "run.json").write_text(json.dumps({"num_processes": 1}))
    lines = [
        {
            "step": step,
            "loss": 10 / step,
            "epoch": step / 40,
            **({"num_tokens": step * tokens} if tokens else {}),
        }
        for step in steps
    ]
    lines += [{"step": step, "eval_loss": 3.0} for step in steps if step % 50 == 0]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    times = [
        {"step": step, "seconds": 2.0 * (step - before)}
        for before, step in zip((0, *steps), steps, strict=False)
    ]
    (folder / "performance.jsonl").write_text("".join(json.dumps(line) + "\n" for line in times))
    FolderLock(folder).release()  # without the lock's file the run may be at work


@pytest.fixture
def opened(webui: Served, page: Page) -> Page:
    for name, steps, tokens in (("slow", STEPS, 50), ("quick", STEPS, 0), ("none", (), 0)):
        if not (folder := webui.folder / "runs" / name).exists():
            make_run(folder, steps, tokens=tokens)
    page.goto(webui.url)
    chromium.settled(page)
    return page


def values(page: Page) -> str:
    """The values under the first chart, on one line."""
    return " ".join(page.locator("figure.chart .legend").first.inner_text().split())


@pytest.mark.parametrize(
    ("across", "first"),
    [("step", "step 1 Loss 10"), ("tokens", "tokens 50 Loss 10"), ("time", "time 2 s Loss 10")],
)
def test_the_keyboard_shows_the_values_of_every_line_across_each_axis(
    webui: Served, opened: Page, across: str, first: str
) -> None:
    opened.goto(f"{webui.address}/runs/slow?x={across}")
    chart = opened.locator("figure.chart .plot").first
    chart.locator("canvas").wait_for()
    chart.focus()
    opened.keyboard.press("Home")
    assert values(opened).startswith(first)
    assert "Eval loss 3 at" in values(opened), "the nearest held-out loss, and where it stands"
    spoken = opened.locator("figure.chart p[role=status]").first
    assert "Loss" in spoken.inner_text()
    opened.keyboard.press("ArrowRight")
    assert "Loss 1 " in values(opened)


def test_a_zoom_by_keyboard_is_kept_in_the_url_and_undone(webui: Served, opened: Page) -> None:
    opened.goto(f"{webui.address}/runs/slow?x=time")
    chart = opened.locator("figure.chart .plot").first
    chart.locator("canvas").wait_for()
    chart.focus()
    opened.keyboard.press("+")
    opened.get_by_role("button", name="show all").wait_for()
    assert "xmin=" in opened.url
    opened.locator("figure.chart .plot").first.focus()
    opened.keyboard.press("-")
    opened.get_by_role("button", name="show all").wait_for(state="detached")
    assert "xmin=" not in opened.url


def test_a_run_that_counts_no_tokens_says_so_and_one_beside_it_is_drawn(webui: Served, opened: Page) -> None:
    opened.goto(f"{webui.address}/runs/quick?x=tokens")
    opened.get_by_text("No values by tokens").first.wait_for()
    opened.goto(f"{webui.address}/runs/quick?x=tokens&with=slow")
    opened.locator("figure.chart .legend .key", has_text="slow").first.wait_for()


def test_the_steps_of_a_run_by_epochs_are_known_and_a_stopped_run_has_no_outcome(
    webui: Served, opened: Page
) -> None:
    opened.goto(f"{webui.address}/runs/slow")
    opened.get_by_text("100 / 120").wait_for()
    opened.get_by_role("button", name="Resume").wait_for()
    assert opened.get_by_text("stopped", exact=True).count() == 1
    assert opened.get_by_role("heading", name="What was gained").count() == 0


def test_an_empty_chart_says_when_its_first_point_comes_or_that_none_will(
    webui: Served, opened: Page
) -> None:
    opened.goto(f"{webui.address}/runs/none")
    opened.get_by_text("It ended before its first step").wait_for()
    lock = FolderLock(webui.folder / "runs" / "none")
    try:
        opened.reload()
        opened.get_by_text("The first point comes with step 1").wait_for()
    finally:
        lock.release()
