"""Moves megabytes between one contributor and the server, ours against a stock Flower deployment.

    python benchmarks/transport.py [--direction up|down] [--quick] [--json] [--plot FILE]

Both run as real processes on loopback with TLS, move the same random bytes, and are timed inside the ServerApp: from
the message until the reply has arrived and the bytes are on the hub's disk (ours) or in the ServerApp's memory
(Flower's). A round has a fixed cost: Flower's SuperNode polls for work every three seconds and starts a process for the
ClientApp, while ours keeps a stream open. The marginal cost is therefore reported first. It is the slope of seconds
over size of a line through all runs of all sizes, with minimum and maximum of the single runs' slopes. The line's
intercept and entire rounds follow. The two sides alternate, with the same number of runs.
"""

from __future__ import annotations

import statistics

from _flower_peer import measure_flower
from _gym_hub import measure_gym
from _peer import Peer, in_turns
from _processes import Measurement
from _report import Report, options

SIZES_MB = (1, 200, 500)
QUICK_SIZES_MB = (1, 20)
RUNS = 3
FLAT_MB = 64

Runs = list[dict[int, Measurement]]
"""Runs, each of which has one measurement of every size."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", metavar="MB", help="megabytes to move, at least two")
    parser.add_argument("--runs", type=int, help=f"measurements of every size ({RUNS})")
    parser.add_argument("--direction", choices=("up", "down"), help="one of the two")
    arguments = parser.parse_args()
    sizes = tuple(sorted(arguments.sizes or (QUICK_SIZES_MB if arguments.quick else SIZES_MB)))
    if len(set(sizes)) < 2:
        parser.error("--sizes: a slope needs two sizes")
    report = Report("transport", peer="Flower 1.41")
    for direction in (arguments.direction,) if arguments.direction else ("up", "down"):
        runs = arguments.runs or (1 if arguments.quick else RUNS)
        sides = Peer("gym-fed", measure_gym), Peer("Flower", measure_flower)
        for _ in range(runs):
            for megabytes in sizes:
                in_turns(sides, 1, direction, megabytes)
        ours, theirs = (in_runs(side, len(sizes)) for side in sides)
        compare(report, direction, ours, theirs)
    report.finish(arguments)


def in_runs(side: Peer, sizes: int) -> Runs:
    """Return a side's measurements by run and size."""
    starts = range(0, len(side.results), sizes)
    return [{made.megabytes: made for made in side.results[at : at + sizes]} for at in starts]


def line(runs: Runs) -> tuple[float, float]:
    """Return the seconds per 100 MB and the intercept of a least-squares line through all measurements."""
    sizes = [size for run in runs for size in run]
    seconds = [run[size].seconds for run in runs for size in run]
    fitted = statistics.linear_regression(sizes, seconds)
    return 100 * fitted.slope, fitted.intercept


def slopes(runs: Runs) -> list[float]:
    """Return the seconds per 100 MB of every run, between its smallest and its largest size."""
    found = []
    for run in runs:
        least, most = min(run), max(run)
        found.append(100 * (run[most].seconds - run[least].seconds) / (most - least))
    return found


def compare(report: Report, direction: str, ours: Runs, theirs: Runs) -> None:
    """Report marginal cost, fixed cost, entire rounds, peak memory and the aims."""
    (slope, fixed), (their_slope, their_fixed) = line(ours), line(theirs)
    report.compare(f"100 MB more {direction}", slope, their_slope, unit="s")
    report.compare(f"100 MB more {direction}, by run", slopes(ours), slopes(theirs), unit="s")
    report.compare(f"a round of 0 MB {direction}", fixed, their_fixed, unit="s")
    sizes = sorted(ours[0])
    for size in sizes:
        seconds, their_seconds = ([run[size].seconds for run in runs] for runs in (ours, theirs))
        report.compare(f"{size} MB {direction}, a round", seconds, their_seconds, unit="s")
    for size in sizes:
        peaks = [max(max(run[size].peak_rss_mb.values()) for run in runs) for runs in (ours, theirs)]
        report.compare(f"{size} MB {direction}, peak memory", *peaks, unit="MB")
        for runs in (ours, theirs):
            for role in runs[0][size].peak_rss_mb:
                peak = max(run[size].peak_rss_mb[role] for run in runs)
                report.figure(f"peak_mb_{direction}_{size}_{role.lower()}", peak)
    report.aim(f"100 MB more {direction}: share of Flower's time", slope / their_slope, 1.0)
    growth = peak_of_hub(ours, sizes[-1]) - peak_of_hub(ours, sizes[0])
    name = f"the hub's memory from {sizes[0]} to {sizes[-1]} MB {direction} (MB more)"
    report.aim(name, growth, FLAT_MB)


def peak_of_hub(runs: Runs, size: int) -> float:
    return statistics.median(run[size].peak_rss_mb["hub"] for run in runs)


if __name__ == "__main__":
    main()
