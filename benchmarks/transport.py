"""Moves megabytes between one contributor and the server, ours against a stock Flower deployment.

    python benchmarks/transport.py [--quick] [--json] [--plot FILE]

Both run as real processes on loopback with TLS and move the same random bytes. What the seconds hold differs and
is told here: Flower's are a round of its own, with its polling and the start of a ClientApp's process, about 6 s
whatever the size, and end in memory; ours are a client's connection, session, transfer and the write to disk.
Hence each is also compared less its own smallest transfer, which leaves what the bytes cost. Peak memory is that
of the largest process; the figures have every process's.
"""

from __future__ import annotations

from collections.abc import Callable

from _flower_peer import measure_flower
from _gym_hub import measure_gym
from _processes import Measurement
from _report import Report, options

SIZES_MB = (1, 100, 500)
QUICK_SIZES_MB = (20,)
FLAT_MB = 64


def main() -> None:
    """Measure every size in both directions, side by side."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", metavar="MB", help="megabytes to move")
    arguments = parser.parse_args()
    sizes = arguments.sizes or (QUICK_SIZES_MB if arguments.quick else SIZES_MB)
    report = Report("transport", peer="Flower 1.41")
    for direction in ("up", "down"):
        ours = measure_all(measure_gym, direction, sizes)
        theirs = measure_all(measure_flower, direction, sizes)
        compare(report, direction, ours, theirs)
    report.finish(arguments)


def measure_all(
    measure: Callable[[str, int], Measurement], direction: str, sizes: tuple[int, ...]
) -> dict[int, Measurement]:
    """One measurement a size, each in processes of its own."""
    return {megabytes: measure(direction, megabytes) for megabytes in sizes}


def compare(
    report: Report, direction: str, ours: dict[int, Measurement], theirs: dict[int, Measurement]
) -> None:
    """Rows of seconds, of seconds less the smallest transfer's, and of peak memory; and the aims."""
    least, most = min(ours), max(ours)
    for size in ours:
        report.compare(f"{size} MB {direction}", ours[size].seconds, theirs[size].seconds, unit="s")
    for size in ours:
        if size > least:
            net = [side[size].seconds - side[least].seconds for side in (ours, theirs)]
            report.compare(f"{size} MB {direction}, less {least} MB", *net, unit="s")
    for size in ours:
        peaks = [max(side[size].peak_rss_mb.values()) for side in (ours, theirs)]
        report.compare(f"{size} MB {direction}, peak memory", *peaks, unit="MB")
        for side in (ours, theirs):
            for role, peak in side[size].peak_rss_mb.items():
                report.figure(f"peak_mb_{direction}_{size}_{role.lower()}", peak)
    speedup = theirs[most].seconds / ours[most].seconds
    report.aim(f"{most} MB {direction} is faster than Flower", figure=speedup, aim=1.0, better="higher")
    if most > least:
        for role in ("hub", "client"):
            growth = ours[most].peak_rss_mb[role] - ours[least].peak_rss_mb[role]
            name = f"the {role}'s memory stays flat from {least} to {most} MB {direction} (MB more)"
            report.aim(name, figure=growth, aim=FLAT_MB, better="lower")


if __name__ == "__main__":
    main()
