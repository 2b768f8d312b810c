"""Read the plots of ``plots.yaml``, with their figures from the tables in docs/."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
FOLDER = DOCS / "plots"
LIST = Path(__file__).with_name("plots.yaml")

_NUMBER = r"[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?"
_FIGURE = re.compile(
    rf"(?P<value>{_NUMBER})(?: ?(?P<unit>ms|s|kB|MB|GB|MiB|GiB|%|x)(?![\w/]))?"
    rf"(?: \((?P<least>{_NUMBER})(?: to |-)(?P<most>{_NUMBER})\))?"
)
_SCALES = {"ms": 1e-3, "kB": 1e-3, "MB": 1.0, "GB": 1e3}
"""Scales of the units that may differ within a table; the plot is in seconds or megabytes."""


@dataclass(frozen=True)
class Figure:
    """A number in a cell.

    Attributes:
        text: The number as on the page, with its unit.
        value: The value; times are in seconds and sizes in megabytes, if the cell has a unit that differs.
        least: The smallest value of several runs, if the cell has it.
        most: The largest value of several runs, if the cell has it.
    """

    text: str
    value: float
    least: float | None = None
    most: float | None = None


@dataclass(frozen=True)
class Plot:
    """A plot of bars.

    Attributes:
        title: Title of the plot.
        series: Names of the bars of each group.
        groups: Label and figures of each group, one figure per series; None for a cell without a figure.
        log: True for a logarithmic axis.
        page: Page that contains the table.
        scripts: Benchmarks that measured the figures.
    """

    title: str
    series: tuple[str, ...]
    groups: tuple[tuple[str, tuple[Figure | None, ...]], ...]
    log: bool
    page: Path
    scripts: tuple[str, ...]


def plots() -> dict[str, Plot]:
    """Read all plots, by name.

    Raises:
        ValueError: If a page has no table with the header of a plot, or the table lacks a row of the plot.
    """
    listed = yaml.safe_load(LIST.read_text(encoding="utf-8"))
    return {name: _plot(name, **entry) for name, entry in listed["plots"].items()}


def _plot(
    name: str,
    *,
    page: str,
    header: str,
    title: str,
    scripts: list[str],
    series: dict[str, Any],
    table: int = 0,
    rows: list[int | str] | None = None,
    labels: list[int] | None = None,
    transpose: bool = False,
    log: bool = False,
) -> Plot:
    file = DOCS / f"{page}.md"
    found = _rows_below(header, file.read_text(encoding="utf-8"))
    if table >= len(found):
        raise ValueError(f"plot {name}: {file.name} has {len(found)} tables with the header {header}")
    groups, seen = [], ""
    for row in _chosen(found[table], rows):
        words = [_plain(row[column]) for column in labels or [0]]
        seen = words[0] or seen  # an empty first cell repeats the one above
        if seen.isdigit():
            seen = f"{header.split('|')[1].strip()} {seen}"  # "seed 101"
        places = [(place, 0) if isinstance(place, int) else tuple(place) for place in series.values()]
        label = ", ".join(filter(None, [seen, *words[1:]]))
        groups.append((label, tuple(_figure(row[column], number) for column, number in places)))
    names = tuple(series)
    if transpose:
        others = zip(*(figures for _, figures in groups), strict=True)
        names, groups = tuple(label for label, _ in groups), list(zip(names, others, strict=True))
    if not any(figure for _, figures in groups for figure in figures):
        raise ValueError(f"plot {name}: no cell has a number")
    return Plot(title, names, tuple(groups), log, file, tuple(scripts))


def _chosen(every: list[list[str]], rows: list[int | str] | None) -> list[list[str]]:
    """Return rows by their number, or by a text of one cell; all of them for None."""
    if rows is None:
        return every
    chosen = []
    for selector in rows:
        matches = [
            row
            for number, row in enumerate(every)
            if selector == number or any(selector == cell for cell in row)
        ]
        if len(matches) != 1:
            raise ValueError(f"{len(matches)} rows match {selector!r}")
        chosen += matches
    return chosen


def _rows_below(header: str, text: str) -> list[list[list[str]]]:
    """Return the cells of every table with this header."""
    all_tables, lines = [], [line.strip() for line in text.splitlines()]
    for at, line in enumerate(lines):
        if line == header:
            table = []
            for row in lines[at + 2 :]:
                if not row.startswith("|"):
                    break
                table.append([cell.strip() for cell in row.strip("|").split("|")])
            all_tables.append(table)
    return all_tables


def _figure(cell: str, number: int) -> Figure | None:
    """Return a number of a cell, counted from 0; None if the cell has none."""
    figures = list(_FIGURE.finditer(cell.replace("**", "")))
    if number >= len(figures):
        return None
    match = figures[number]
    scale = _SCALES.get(match["unit"] or "", 1.0)
    value, least, most = (_number(match[part], scale) for part in ("value", "least", "most"))
    assert value is not None
    unit = "" if match["unit"] is None else match["unit"] if match["unit"] == "%" else f" {match['unit']}"
    return Figure(f"{match['value']}{unit}", value, least, most)


def _number(text: str | None, scale: float) -> float | None:
    return None if text is None else scale * float(text.replace(",", "").replace("−", "-"))


def _plain(cell: str) -> str:
    """Return a cell's text without Markdown."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).replace("`", "").replace("**", "")
