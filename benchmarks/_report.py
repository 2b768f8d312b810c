"""Shared parts of all benchmarks: options, the table with ratios to a peer, the JSON line and the plot.

    parser = options("what is measured")            # --quick, --json, --plot FILE
    report = Report("transport", peer="Flower 1.41")
    report.compare("500 MB up", ours=3.1, theirs=19.8, unit="s", better="lower")
    report.aim("500 MB up beats Flower", 3.1 / 19.8, 1.0)
    report.finish(parser.parse_args())

The JSON line, the last of the output, is one object: ``{"name", "machine", "figures": {...}, "aims": [{"name",
"figure", "aim", "better", "met"}]}``, where an aim's ``figure`` is what was measured. A missed aim is reported but is
not a failure.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Better = Literal["higher", "lower"]
Runs = float | Sequence[float]
"""One figure, or the figures of several runs."""
SHARED = Path(__file__).resolve().parents[2] / "shared"
"""Default folder of models and data."""


def options(description: str | None, *more: str, seeds: Sequence[int] | int = ()) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share, to which scripts add their own.

    Args:
        description: The script's docstring, whose first line is shown.
        more: ``cells`` and ``shared``, for scripts that store runs or read models and data.
        seeds: Default of ``--seeds``, which are seeds or their number.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes, under a minute")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the comparison into a picture")
    if "cells" in more:
        parser.add_argument("--cells", type=Path, metavar="FILE", help="keep what is measured, and resume")
    if "shared" in more:
        parser.add_argument("--shared", type=Path, default=SHARED, metavar="FOLDER", help="models and data")
    if isinstance(seeds, int):
        parser.add_argument("--seeds", type=int, default=seeds, metavar="N", help="number of seeds")
    elif seeds:
        parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds), metavar="N")
    return parser


@dataclass(frozen=True)
class Row:
    """One measured quantity of our side, and of the peer's if there is one."""

    what: str
    ours: float
    theirs: float | None
    unit: str
    better: Better
    spread: str = ""
    peer_spread: str = ""
    """Minimum and maximum of several runs, as text."""

    @property
    def ratio(self) -> float | None:
        """Return the ratio of the two sides, above 1 if ours is better."""
        if self.theirs is None or not self.ours or not self.theirs:
            return None
        return self.theirs / self.ours if self.better == "lower" else self.ours / self.theirs


class Report:
    """Collects rows, figures and aims, and prints them."""

    def __init__(self, name: str, peer: str = "") -> None:
        self.name = name
        self.peer = peer
        self.rows: list[Row] = []
        self.figures: dict[str, float] = {}
        self.aims: list[dict[str, Any]] = []

    def compare(
        self, what: str, ours: Runs, theirs: Runs | None = None, *, unit: str = "", better: Better = "lower"
    ) -> None:
        """Add a row to the table, and the figures ``what`` (ours) and ``what (peer)``.

        For several runs, the row has the median with minimum and maximum, which are added as figures too.
        """
        name = key(f"{what} {unit}")
        own, spread = self._of_runs(name, ours)
        peer, peer_spread = (None, "") if theirs is None else self._of_runs(f"{name}_peer", theirs)
        self.rows.append(Row(what, own, peer, unit, better, spread, peer_spread))

    def _of_runs(self, name: str, runs: Runs) -> tuple[float, str]:
        """Add a side's figures; return its median, and its spread as text."""
        if isinstance(runs, int | float):
            self.figure(name, runs)
            return runs, ""
        middle, least, most = statistics.median(runs), min(runs), max(runs)
        for suffix, value in (("", middle), ("_least", least), ("_most", most)):
            self.figure(f"{name}{suffix}", value)
        return middle, f" ({_short(least)}-{_short(most)})"

    def figure(self, key: str, value: float) -> None:
        """Add a figure to the JSON line."""
        if key in self.figures or not math.isfinite(value):
            raise ValueError(f"figure {key!r} = {value} is given twice or not finite")
        self.figures[key] = value

    def aim(self, name: str, figure: float, aim: float, better: Better = "lower") -> bool:
        """Add an aim; return True if ``figure`` reaches it."""
        met = figure >= aim if better == "higher" else figure <= aim
        self.aims.append({"name": name, "figure": figure, "aim": aim, "better": better, "met": met})
        return met

    def finish(self, arguments: argparse.Namespace) -> None:
        """Print the table and, depending on the options, draw the plot and print the JSON line."""
        # Outside a terminal the width is not limited, and wrapped rows are hard to search.
        console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 160)
        console.print(self._table(), soft_wrap=False)
        for aim in self.aims:
            sign = "<=" if aim["better"] == "lower" else ">="
            line = f"{aim['name']}: {_short(aim['figure'])}, aim {sign} {_short(aim['aim'])}"
            console.print("[green]met[/green]   " if aim["met"] else "[red]missed[/red]", line)
        if arguments.plot:
            plot(self, arguments.plot)
        if arguments.json:
            document = {"name": self.name, "machine": machine(), "figures": self.figures, "aims": self.aims}
            sys.stdout.write(json.dumps(document, sort_keys=True, allow_nan=False) + "\n")

    def _table(self) -> Table:
        described = machine()
        title = f"{self.name} on {described['cores']} cores of {described['processor']}"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("")
        for header in ("ours", self.peer or "peer", "times better"):
            table.add_column(header, justify="right")
        for row in self.rows:
            theirs = "-" if row.theirs is None else f"{_short(row.theirs)}{row.peer_spread} {row.unit}"
            ratio = "-" if row.ratio is None else f"{row.ratio:.2f}x"
            table.add_row(row.what, f"{_short(row.ours)}{row.spread} {row.unit}", theirs, ratio)
        return table


def show(title: str, headers: Iterable[str], rows: Iterable[Sequence[str]], note: str = "") -> None:
    """Print a table whose first column is text and whose other columns are figures, and a note below it."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 240)
    console.print(table)
    if note:
        console.print(note, soft_wrap=True)


def key(text: str) -> str:
    return re.sub(r"\W+", "_", text.lower()).strip("_")


def load() -> str:
    """Return the machine's load as text, for the note of a table."""
    return f"load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "load unknown"


def kept(file: Path | None, name: Any, make: Callable[[], Any]) -> Any:
    """Return the stored result of ``name`` from ``file`` (JSON lines), or else call ``make`` and store its result."""
    wanted = json.dumps(name, sort_keys=True)
    if file is not None and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            cell = json.loads(line)
            if json.dumps(cell["key"], sort_keys=True) == wanted:
                return cell["found"]
    found = make()
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"key": name, "found": found}) + "\n")
    return found


@contextmanager
def picture(file: Path, rows: int, columns: int, size: tuple[float, float]) -> Iterator[Any]:
    """Yield ``[rows, columns]`` panels to draw on, and write them to the file at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(rows, columns, figsize=size, squeeze=False)
    yield panels
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
    print(f"picture: {file}", file=sys.stderr)


def plot(report: Report, file: Path) -> None:
    """Draw bars of our figures next to the peer's on a logarithmic axis, with one panel per unit."""
    rows = [row for row in report.rows if row.theirs is not None] or report.rows
    units = list(dict.fromkeys(row.unit for row in rows))
    size = 8.0, 1.2 + 0.55 * len(rows) + 0.6 * len(units)
    with picture(file, len(units), 1, size) as panels:
        for unit, panel in zip(units, panels[:, 0], strict=True):
            shown = [row for row in rows if row.unit == unit]
            places = range(len(shown))
            panel.barh([p - 0.2 for p in places], [row.ours for row in shown], 0.38, label="gym-fed")
            if any(row.theirs for row in shown):
                theirs = [row.theirs or 0 for row in shown]
                panel.barh([p + 0.2 for p in places], theirs, 0.38, label=report.peer)
            panel.set_yticks(list(places), [row.what for row in shown])
            panel.set(xlabel=f"{unit or 'value'} ({shown[0].better} is better)", xscale="log")
            panel.invert_yaxis()
            panel.legend()
        panels[0, 0].set_title(report.name)


def machine() -> dict[str, Any]:
    """Return the environment of the figures: processor, vector extensions, cores, system and versions."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    vectors = [
        name for name in ("avx2", "avx512f", "avx512_vnni", "amx_int8") if re.search(rf"\b{name}\b", text)
    ]
    return {
        "processor": model[1] if model else platform.processor() or platform.machine(),
        "vectors": vectors,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
