"""What the pages cost: server CPU by open tab, bytes and seconds of a first view, a hub's memory and rounds.

    python benchmarks/web.py --gradio-python PYTHON [--part page|hub|large|readers ...] [--quick] [--json]

The parts:

    page     the same page (a chart of 200 points, a table of 20 rows, new once a second) by our server and by Gradio,
             in tabs of a real Chromium: CPU of the server by number of tabs, requests and bytes of the first view,
             seconds to the first chart
    hub      the first view of a hub's dashboard, and the memory that the dashboard adds to a hub
    large    every screen of a hub with 200 contributors after 1,000 rounds: seconds until it is shown whole
    readers  rounds of a hub with 200 readers of its events, and without, in turns

A tab counts as open while it is a window of its own: browsers slow down the timers of hidden ones, which would spare
a page that polls.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _report import Report, options

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from _web_hub import added_memory, first_view_of_hub, rounds_with_readers, screens_of_large_hub
from _web_tabs import Measured, Side, measured

TABS, QUICK_TABS = (1, 10), (1,)
AIM_TAB_MS, AIM_TABS = 10.0, 10
AIM_BYTES, AIM_REQUESTS = 150.0, 10.0
AIM_TIMES = 10.0
AIM_ROUND = 1.1
AIM_SCREEN_SECONDS = 1.0


def main() -> None:
    """Every part that is named."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS), help="which, in this order")
    parser.add_argument("--gradio-python", type=Path, help="of an environment with Gradio; none: ours alone")
    parser.add_argument("--rounds", type=int, help="of a hub, with readers and without; in all")
    parser.add_argument("--readers", type=int, default=200)
    arguments = parser.parse_args()
    report = Report("web", peer="Gradio")
    for part in arguments.part:
        with tempfile.TemporaryDirectory(prefix="gym-web-") as name:
            PARTS[part](arguments, report, Path(name))
    report.finish(arguments)


def page_part(arguments: argparse.Namespace, report: Report, folder: Path) -> None:
    """Both sides in turns."""
    quick: bool = arguments.quick
    gradio: Path | None = arguments.gradio_python
    tabs, seconds, turns = (QUICK_TABS, 5.0, 1) if quick else (TABS, 20.0, 3)
    sides = {"ours": Side("ours", Path(sys.executable))}
    if gradio is not None:
        sides["gradio"] = Side("gradio", gradio)
    found = {
        name: [measured(side, tabs, seconds, folder) for _ in range(turns)] for name, side in sides.items()
    }

    def median(side: str, of: Callable[[Measured], float]) -> float | None:
        return statistics.median(of(one) for one in found[side]) if side in found else None

    for count in tabs:

        def cpu(one: Measured, count: int = count) -> float:
            return one.cpu_ms[count]

        ours, theirs = median("ours", cpu), median("gradio", cpu)
        assert ours is not None
        report.compare(f"server CPU, {count} tabs", ours, theirs, unit="ms a second")
        spread = [cpu(one) for one in found["ours"]]
        report.figure(f"server_cpu_{count}_tabs_least", min(spread))
        report.figure(f"server_cpu_{count}_tabs_most", max(spread))
        if count == AIM_TABS:
            report.aim("server CPU at 10 tabs, ms a second", figure=ours, aim=AIM_TAB_MS, better="lower")
        if theirs is not None:
            name = f"Gradio's server CPU over ours, {count} tabs"
            report.aim(name, figure=theirs / ours, aim=AIM_TIMES, better="higher")
    figures: tuple[tuple[str, str, Callable[[Measured], float]], ...] = (
        ("requests of the first view", "", lambda one: float(one.requests)),
        ("first view", "kB", lambda one: one.kilobytes),
        ("first chart", "s", lambda one: one.chart_seconds),
        ("memory of the server", "MB", lambda one: one.memory_mb),
    )
    for what, unit, of in figures:
        ours = median("ours", of)
        assert ours is not None
        report.compare(what, ours, median("gradio", of), unit=unit)


def hub_part(arguments: argparse.Namespace, report: Report, folder: Path) -> None:
    """A hub after its rounds."""
    requests, kilobytes, seconds = first_view_of_hub(folder / "shown")
    report.compare("hub's dashboard, requests of the first view", float(requests))
    report.compare("hub's dashboard, first view", kilobytes, unit="kB")
    report.compare("hub's dashboard, shown after", seconds, unit="s")
    report.aim("requests of the dashboard's first view", figure=requests, aim=AIM_REQUESTS, better="lower")
    report.aim("kB of the dashboard's first view", figure=kilobytes, aim=AIM_BYTES, better="lower")
    turns = 1 if arguments.quick else 3
    added = [added_memory(folder / f"memory-{turn}") for turn in range(turns)]
    report.compare("memory that the dashboard adds to a hub", statistics.median(added), unit="MB")
    report.figure("dashboard_memory_least", min(added))
    report.figure("dashboard_memory_most", max(added))


def large_part(arguments: argparse.Namespace, report: Report, folder: Path) -> None:
    """A hub that has been at work for long."""
    rounds, turns = (100, 1) if arguments.quick else (1000, 3)
    found = screens_of_large_hub(folder / "large", rounds, turns)
    for screen, seconds in found.items():
        report.compare(f"{screen} of {rounds} rounds, shown after", statistics.median(seconds), unit="s")
    slowest = max(max(seconds) for seconds in found.values())
    name = f"slowest view of any screen at {rounds} rounds, s"
    report.aim(name, figure=slowest, aim=AIM_SCREEN_SECONDS, better="lower")


def readers_part(arguments: argparse.Namespace, report: Report, folder: Path) -> None:
    """Rounds of one hub, every other one with readers."""
    rounds = arguments.rounds or (4 if arguments.quick else 16)
    readers: int = arguments.readers
    began = time.monotonic()
    without, with_readers = rounds_with_readers(folder, rounds, readers)
    report.figure("rounds_seconds", time.monotonic() - began)
    for name, found in ((f"round with {readers} readers", with_readers), ("round without readers", without)):
        report.compare(name, statistics.median(found), unit="s")
        key = name.replace(" ", "_")
        report.figure(f"{key}_least", min(found))
        report.figure(f"{key}_most", max(found))
    shares = [one / other for one, other in zip(with_readers, without, strict=True)]
    report.figure("round_share_least", min(shares))
    report.figure("round_share_most", max(shares))
    name = f"a round with {readers} readers over one without, median of pairs"
    report.aim(name, figure=statistics.median(shares), aim=AIM_ROUND, better="lower")


PARTS = {"page": page_part, "hub": hub_part, "large": large_part, "readers": readers_part}

if __name__ == "__main__":
    main()
