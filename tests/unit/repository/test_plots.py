"""The plots of docs/plots/ have the figures of their pages, and every benchmark that a page quotes has one."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml

from tools.plots import tables
from tools.plots.drawing import drawn
from tools.plots.tables import DOCS, FOLDER, LIST, ROOT, Figure, Plot, plots

EVERY = plots()
MOST_BYTES = 200_000


@pytest.mark.parametrize("name", EVERY)
def test_a_plot_is_drawn_from_the_table_of_its_page_and_shown_there(name: str) -> None:
    plot = EVERY[name]
    committed = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert committed == drawn(plot), "the page has changed: python -m tools.plots"
    assert f"](plots/{name}.svg)" in plot.page.read_text(encoding="utf-8")
    ElementTree.fromstring(committed)
    colours = re.findall(r"#([0-9a-f]{3,6})\b", committed)
    assert [colour for colour in colours if colour[:2] * 3 not in (colour, colour * 2)] == [], "greys alone"


def test_all_plots_are_listed_and_small() -> None:
    files = list(FOLDER.iterdir())
    assert {file.name for file in files} == {f"{name}.svg" for name in EVERY}
    assert sum(file.stat().st_size for file in files) < MOST_BYTES


def test_every_benchmark_that_a_page_quotes_has_a_plot_or_a_reason() -> None:
    pages = "\n".join(file.read_text(encoding="utf-8") for file in DOCS.glob("*.md"))
    scripts = {file.name for file in (ROOT / "benchmarks").glob("[a-z]*.py")}
    quoted = {name for name in scripts if re.search(rf"(?<!\w){re.escape(name)}", pages)}
    listed = yaml.safe_load(LIST.read_text(encoding="utf-8"))["not_plotted"]
    plotted = {script for plot in EVERY.values() for script in plot.scripts}
    assert plotted <= scripts
    assert not plotted & set(listed)
    assert quoted == plotted | set(listed)


def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str) -> None:
    monkeypatch.setattr(tables, "DOCS", tmp_path)
    (tmp_path / "some.md").write_text(f"# Some\n\n| seed | ours | theirs |\n|---|---|---|\n{rows}\n\ntext\n")


def some(**more: object) -> Plot:
    entry = {"page": "some", "header": "| seed | ours | theirs |", "title": "t", "scripts": []}
    return tables._plot("some", **{**entry, "series": {"ours": 1, "theirs": [2, 1]}, **more})  # type: ignore[arg-type]


def test_figures_are_read_with_units_ranges_and_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page(
        tmp_path,
        monkeypatch,
        "| 7 | **16 ms** (8 to 32) | 1,000 -> 2.5e-3 |\n| `b` | not measured | 1/16; 96.5% |",
    )
    assert some().groups == (
        ("seed 7", (Figure("16 ms", 16e-3, 8e-3, 32e-3), Figure("2.5e-3", 0.0025))),
        ("b", (None, Figure("16", 16.0))),
    )
    turned = some(transpose=True)
    assert turned.series == ("seed 7", "b")
    assert [label for label, _ in turned.groups] == ["ours", "theirs"]


def test_a_changed_table_is_an_error_and_not_another_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page(tmp_path, monkeypatch, "| 7 | 1 | 2 |")
    for wrong in ({"header": "| seed | ours |"}, {"table": 1}, {"rows": [3]}, {"rows": ["8"]}):
        with pytest.raises(ValueError, match=r"tables|rows"):
            some(**wrong)
    with pytest.raises(ValueError, match="no cell"):
        some(series={"theirs": [2, 5]})
    with pytest.raises(ValueError, match="no positive"):
        drawn(Plot("t", ("a",), (("x", (Figure("0", 0.0),)),), True, tmp_path, ()))


def test_a_name_from_a_page_is_text_in_the_picture(tmp_path: Path) -> None:
    figure = Figure("1", 1.0)
    text = drawn(Plot("<t>", ("<s>", "u"), (("<x onload='y'>", (figure, figure)),), False, tmp_path, ()))
    assert {element.tag.partition("}")[2] for element in ElementTree.fromstring(text).iter()} == {
        "svg", "title", "style", "rect", "text", "line",
    }  # fmt: skip
