"""Moves megabytes between one contributor and the server, ours against a stock Flower deployment.

    python benchmarks/transport.py [--quick] [--json] [--plot FILE]

Both run as real processes on loopback with TLS, move the same random bytes, and are timed alike: inside the ServerApp,
around ``send_and_receive``, until the reply is there and the bytes are on the hub's disk (ours) or in the ServerApp's
memory (Flower's). Flower's rounds hold its polling and the start of a ClientApp's process, about 6 s whatever the
size; ours hold the agent's. So each is also compared less its own smallest transfer. Peak memory is per process.
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
    share_at = 100 if 100 in ours else most
    share = ours[share_at].seconds / theirs[share_at].seconds
    report.aim(f"{share_at} MB {direction}: share of Flower's time", figure=share, aim=0.5, better="lower")
    if most > least:
        growth = ours[most].peak_rss_mb["hub"] - ours[least].peak_rss_mb["hub"]
        name = f"the hub's memory from {least} to {most} MB {direction} (MB more)"
        report.aim(name, figure=growth, aim=FLAT_MB, better="lower")


if __name__ == "__main__":
    main()
