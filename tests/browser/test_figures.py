"""Figures that a page computes itself, and links that carry what was shown to another screen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.conftest import RUN, Served, watched_pages
from tests.support import chromium

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def computed(page: Page, module: str, expression: str) -> Any:
    """What an expression of a module's exports comes to in the page."""
    return page.evaluate(
        f"async () => {{ const m = await import('/static/{module}'); return {expression}; }}"
    )


@pytest.fixture(scope="module")
def computing(webui: Served, browser: Browser) -> Iterator[Page]:
    """A page that computes for many tests, which leave it as it is."""
    with watched_pages(browser) as open_page:
        page, _ = open_page()
        page.goto(webui.url)
        chromium.settled(page)
        yield page


@pytest.fixture
def opened(webui: Served, page: Page) -> Page:
    page.goto(webui.url)
    chromium.settled(page)
    return page


def test_smoothing_is_the_corrected_moving_average(computing: Page) -> None:
    values, share = [4.0, 2.0, 8.0, 1.0, 1.0], 0.6
    mean, expected = 0.0, []
    for count, value in enumerate(values, 1):
        mean = share * mean + (1 - share) * value
        expected.append(mean / (1 - share**count))
    found = computed(
        computing, "charts.js", f"m.smoothed({[[at, y] for at, y in enumerate(values)]}, {share})"
    )
    assert [x for x, _ in found] == list(range(5))
    assert [y for _, y in found] == pytest.approx(expected)
    assert computed(computing, "charts.js", "m.smoothed([[1, 5]], 0)") == [[1, 5]]


@pytest.mark.parametrize(
    ("ticks", "is_log", "texts"),
    [
        ([3.906e-4, 3.91e-4, 3.914e-4], False, ["3.906e-4", "3.910e-4", "3.914e-4"]),
        ([0, 0.00025, 0.0005, 0.001], False, ["0", "0.00025", "0.00050", "0.00100"]),
        ([0.30000000000000004, 0.4], False, ["0.3", "0.4"]),
        ([-1000, 0, 1000], False, ["-1000", "0", "1000"]),
        ([0.001, None, 0.1], True, ["0.001", "", "0.1"]),
    ],
)
def test_the_labels_of_an_axis_have_one_notation_and_differ(
    computing: Page, ticks: list[float | None], is_log: bool, texts: list[str]
) -> None:
    assert computed(computing, "charts.js", f"m.tickTexts({json.dumps([ticks, is_log])[1:-1]})") == texts


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("m.bytes(999)", "999 B"),
        ("m.bytes(2168096)", "2.2 MB"),
        ("m.bytes(999999)", "1.0 MB"),
        ("m.bytes(0)", "0 B"),
        ("m.number(1234567)", "1,234,567"),
        ("m.number(0.083333)", "0.08333"),
        ("m.number(52171.25)", "52,170"),
        ("m.number(1.5e-7)", "1.500e-7"),
        ("m.number(null)", None),
        ("m.number(0.00002914)", "2.914e-5"),
        ("m.number(0.0001)", "0.0001000"),
        ("m.signed(-0.12345)", "−0.1235"),
        ("m.signed(-0.000021)", "−2.1e-5"),
        ("m.signed(0)", "+0.0000"),
        ("m.duration(3599.6)", "1 h 0 min"),
        ("m.duration(61)", "1 min 1 s"),
        ("m.duration(-4)", "0 s"),
        ("m.quoted('my data.jsonl')", "'my data.jsonl'"),
        ("m.quoted('runs/a=b.yaml')", "runs/a=b.yaml"),
        ("m.pathUrl('a b/c#1')", "a%20b/c%231"),
    ],
)
def test_formats(expression: str, text: str | None, computing: Page) -> None:
    assert computed(computing, "app.js", expression) == text


def test_markers_are_at_every_point_where_there_is_room_and_at_some_elsewhere(computing: Page) -> None:
    assert computed(computing, "charts.js", "m.spaced([0, 50, 100], 100)") == [0, 1, 2]
    crowded = computed(computing, "charts.js", "m.spaced([...Array(100).keys()], 100, 9)")
    assert crowded == [9, 65]


INKED = """() => {
  const canvas = document.querySelector("figure.chart canvas");
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let inked = 0;
  for (let at = 3; at < data.length; at += 4) if (data[at] > 40) inked++;
  return inked / (data.length / 4);
}"""


def test_the_values_of_one_run_are_behind_its_smoothed_line(webui: Served, opened: Page) -> None:
    for name in ("jagged", "jagged-2"):
        folder = webui.folder / "runs" / name
        folder.mkdir()
        (folder / "config.yaml").write_text(f"model: gym-nano\noutput_dir: runs/{name}\n")
        (folder / "run.json").write_text(json.dumps({"num_processes": 1}))
        lines = (json.dumps({"step": step, "loss": 1 + 2 * (step % 2)}) for step in range(1, 401))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    inked = []
    for query in ("smoothing=0", "smoothing=0.99", "smoothing=0.99&with=jagged-2"):
        opened.goto(f"{webui.address}/runs/jagged?{query}")
        chromium.settled(opened)
        opened.locator("figure.chart canvas").first.wait_for()
        opened.wait_for_timeout(200)
        inked.append(opened.evaluate(INKED))
    alone, behind, beside_another = inked
    assert alone > behind > 3 * beside_another, inked


def test_every_measurement_of_a_run_has_its_chart(webui: Served, opened: Page) -> None:
    opened.goto(f"{webui.address}/runs/{RUN}")
    chromium.settled(opened)
    titles = opened.locator("figure.chart figcaption").all_inner_texts()
    assert {"Loss", "Learning rate", "Tokens per second", "Peak memory, GB"} <= set(titles)
    opened.locator("details > summary", has_text="further figures").click()
    chromium.settled(opened)
    further = set(opened.locator("details .plots figcaption").all_inner_texts())
    assert not any("Peak" in title for title in further)


def test_chat_opens_with_the_run(webui: Served, opened: Page) -> None:
    opened.goto(f"{webui.address}/runs/{RUN}")
    opened.get_by_role("link", name="Chat", exact=True).click()
    opened.wait_for_selector("#model-0")
    assert opened.locator("#model-0").input_value() == f"runs/{RUN}"


def test_a_zoom_into_a_long_run_shows_every_step(webui: Served, opened: Page, watch: chromium.Watch) -> None:
    folder = webui.folder / "runs" / "long"
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text("model: gym-nano\noutput_dir: runs/long\n")
    (folder / "run.json").write_text(json.dumps({"num_processes": 1}))
    lines = (json.dumps({"step": step, "loss": 1 / step}) for step in range(1, 20_001))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    opened.goto(f"{webui.address}/runs/long")
    chart = opened.locator("figure.chart .u-over").first
    box = chart.bounding_box()
    assert box is not None
    opened.mouse.move(box["x"] + 100, box["y"] + 50)
    opened.mouse.down()
    opened.mouse.move(box["x"] + 160, box["y"] + 50, steps=5)
    opened.mouse.up()
    opened.get_by_role("button", name="show all").wait_for()
    assert any("xmin=" in url for url in watch.requests if "/api/v1/runs/long" in url)
