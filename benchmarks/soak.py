"""Hours of rounds with contributors who join and leave: a quantity of the hub that keeps growing is a defect.

    python benchmarks/soak.py [--hours H] [--members N] [--quick] [--json] [--plot FILE] [--keep FOLDER]

Each seat of the crowd is taken by one contributor after another. Half of them withdraw their account; the others only
disconnect. Memory, open files, threads, the size of the database's write-ahead log, and per minute the p99 of calls and
the hub's CPU per call are plotted. The slope of each (Theil-Sen, without the first sixth of the run) is compared with a
bound. The p99 depends on the load of the machine; the CPU per call hardly does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from _crowd.check import check_credits, committed_rounds, lost_receipts
from _crowd.hub import CrowdHub
from _crowd.member import MALICE, Crowd, Member
from _crowd.updates import Updates
from _report import SHARED, Report, load, options, picture
from crowd import POOL, config_for

HOURS, QUICK_SECONDS, MEMBERS = 6.0, 50.0, 12
_SAMPLE_SECONDS, _MINUTE = 5.0, 60.0
_STAY_SECONDS = 600.0
_WARM_UP = 1 / 6
_MAX_POINTS = 400
"""Maximum number of points whose pairs are compared for a slope."""
SLOPES = {
    "memory_bytes": ("memory", "MB", 1e6, 10.0),
    "files": ("open files", "", 1.0, 2.0),
    "threads": ("threads", "", 1.0, 1.0),
    "wal_bytes": ("write-ahead log", "MB", 1e6, 1.0),
    "p99_seconds": ("p99 of calls", "s", 1.0, 0.1),
    "cpu_ms_per_call": ("CPU per call", "ms", 1.0, 10.0),
}
"""Name, unit, divisor, and the growth per hour above which it is a defect, by field of a sample."""
_BY_MINUTE = ("p99_seconds", "cpu_ms_per_call")
DATABASE = "sqlite:///hub.db"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--hours", type=float, help=f"length of the run ({HOURS:g})")
    parser.add_argument("--members", type=int, default=MEMBERS, help="contributors at a time")
    parser.add_argument("--base", default=str(SHARED / "models" / "stories260K"), help="base model")
    parser.add_argument("--think", type=float, default=10.0, metavar="SECONDS", help="mean time of a task")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the hub's folder here")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gym-soak-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        asyncio.run(soak(arguments, folder))


async def soak(arguments: argparse.Namespace, folder: Path) -> None:
    """Run the hub and its crowd for the given time, check the state, and report the slopes."""
    seconds = (
        3600 * arguments.hours if arguments.hours else QUICK_SECONDS if arguments.quick else 3600 * HOURS
    )
    config = config_for(arguments.members, 1_000_000)
    config["rounds"] |= {"deadline_seconds": 120, "lease_seconds": 15, "grace_max_seconds": 30}
    config["rounds"]["min_contributors"] = 3
    config["storage"]["keep_unneeded_seconds"] = 3600
    updates = Updates(arguments.base, 8)
    with CrowdHub(folder / "hub", arguments.base, config) as hub:
        hub.start()
        think = min(arguments.think, seconds / 20)
        crowd = Crowd(hub.address, hub.certificate, hub.tls, updates, think, random.Random(1))
        minutes: list[dict[str, Any]] = []
        stay = min(_STAY_SECONDS, seconds / 3)
        seats = [asyncio.create_task(seat(crowd, n, stay)) for n in range(arguments.members)]
        watches = [
            asyncio.create_task(hub.sample(_SAMPLE_SECONDS)),
            asyncio.create_task(watch(crowd, minutes, folder / "minutes.jsonl", hub)),
        ]
        failed, _ = await asyncio.wait(seats, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        crowd.over.set()
        for task in failed:
            task.result()
        await asyncio.wait(seats, timeout=60)
        for task in watches:
            task.cancel()
        hub.stop()
    report(arguments, hub, crowd, minutes, seconds)


async def seat(crowd: Crowd, number: int, stay_seconds: float) -> None:
    """Let one contributor after another take part, of whom one in eight is malicious."""
    while not crowd.over.is_set():
        malice = crowd.draw.choice(MALICE) if number % 8 == 0 else ""
        member = Member(crowd, number, malice, flaps=number % 8 == 1)
        with suppress(TimeoutError):
            await asyncio.wait_for(member.run(), crowd.draw.expovariate(1 / stay_seconds))
        if crowd.draw.random() < 0.5 and member.is_enrolled:
            await member.leave()


async def watch(crowd: Crowd, minutes: list[dict[str, Any]], file: Path, hub: CrowdHub) -> None:
    """Record the p99 of calls per minute, also in a file, so that an interrupted run leaves its figures."""
    cpu_before = 0.0
    with file.open("w", encoding="utf-8") as lines:
        while True:
            await asyncio.sleep(_MINUTE)
            calls = crowd.calls.taken()
            cpu = hub.samples[-1].cpu_seconds - cpu_before
            cpu_before += cpu
            found = {
                "at_seconds": hub.samples[-1].at_seconds,
                "p99_seconds": calls.worst(0.99),
                "cpu_ms_per_call": 1000 * cpu / max(1, len(calls)),
                "calls": len(calls),
                "receipts": len(crowd.receipts),
                "load": load(),
                "refused": {f"{method} {code}": n for (method, code), n in calls.refused.items()},
            }
            minutes.append(found)
            lines.write(json.dumps({**found, **asdict(hub.samples[-1])}) + "\n")
            lines.flush()


def slope(points: list[tuple[float, float]]) -> float:
    """Return the median slope of all pairs of points per hour (Theil-Sen), which is robust to outliers."""
    kept = points[:: 1 + len(points) // _MAX_POINTS]
    slopes = [3600 * (y - z) / (a - b) for n, (a, y) in enumerate(kept) for b, z in kept[:n] if a > b]
    return statistics.median(slopes) if slopes else 0.0


def report(
    arguments: argparse.Namespace,
    hub: CrowdHub,
    crowd: Crowd,
    minutes: list[dict[str, Any]],
    seconds: float,
) -> None:
    """Print and draw levels and slopes."""
    lost = lost_receipts(hub, DATABASE, crowd.receipts)
    paid, at_most = check_credits(hub, DATABASE, POOL)
    hub.ask("ledger", "verify")
    rows = [asdict(sample) for sample in hub.samples]
    table = Report("soak")
    table.compare("hours", seconds / 3600, better="higher")
    table.compare("rounds committed", len(committed_rounds(hub, DATABASE)), better="higher")
    table.compare("updates acknowledged", len(crowd.receipts), better="higher")
    lines: dict[str, tuple[list[float], list[float]]] = {}
    for field, (name, unit, divisor, most) in SLOPES.items():
        source = minutes if field in _BY_MINUTE else rows
        points = [(float(row["at_seconds"]), float(row[field]) / divisor) for row in source]
        late = [point for point in points if point[0] >= _WARM_UP * seconds]
        lines[f"{name} {unit}".strip()] = [at / 60 for at, _ in points], [value for _, value in points]
        table.compare(f"{name}, median", statistics.median([v for _, v in late] or [0.0]), unit=unit)
        table.aim(f"{name}, growth in an hour ({unit or 'number'})", slope(late), most)
    table.aim("acknowledged updates lost", len(lost), 0)
    table.aim("credits paid beyond the pools", max(0, paid - at_most), 0)
    plot, arguments.plot = arguments.plot, None
    table.finish(arguments)
    if plot:
        with picture(plot, len(lines), 1, (8, 2 * len(lines))) as panels:
            for panel, (name, (at, values)) in zip(panels.flat, lines.items(), strict=True):
                panel.plot(at, values)
                panel.set(xlabel="minutes", ylabel=name, ylim=(0, None))
    print(load(), file=sys.stderr)


if __name__ == "__main__":
    main()
