"""Merging a round: our rules beside Flower's strategies and ByzFL's rules on the same updates, in seconds and memory.

    python benchmarks/soup.py [--byzfl WHEEL_OR_FOLDER] [--threads N] [--quick] [--json] [--plot FILE]

Updates of 10 and 32 contributors with 5 million float32 each (ten tensors), a fifth of them held to be liars. Ours are
kernels and plans of the package as a merge uses them, on float32 in memory; Flower's are ``aggregate_train`` on replies
in memory; ByzFL's are called on the matrix. ``packed`` merges opened ``.gymdelta`` files of sign bits into tensors in
memory, ``files`` writes the soup too, encoded and synchronised to disk; no peer has either. Every side runs in
processes of its own, in turns, and its fastest run counts; memory is what the process grew by at its highest, inputs
not counted. ByzFL's NNM is left out where it would take more than half of the memory that is free (17 GB for 32
contributors).

ByzFL is no dependency, since its package pulls CUDA: fetch it by ``pip download byzfl==0.0.11 --no-deps`` and name the
wheel, or a folder it is unpacked in; without it those columns are absent. The same rule is not always the same
computation: ByzFL's Krum sums n - f - 1 neighbours, ours, Flower's and the paper's n - f - 2; Flower's Bulyan chooses
by one round of Multi-Krum, ours by Krum anew each time, as its paper does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from _report import Report, options
from gym_quant import kernels

SIZE, QUICK_SIZE = 5_000_000, 500_000
MANY, QUICK_MANY = 1000, 100
TURNS = 2
DEFAULT, CLASSIC = "byzantine_robust", "norm_cap+nnm+trimmed_mean"
PACKED_SECONDS, PACKED_MB = 0.050, 64.0
TIMES_FASTER = 3.0
FLAT_MB = 16.0
Figures = dict[str, tuple[float, float]]


def main() -> None:
    """Measure side by side, 10 and then 32 contributors, then packed ones."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--byzfl", type=Path, metavar="WHEEL_OR_FOLDER", help="ByzFL 0.0.11, to compare with")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of every side; all cores by default"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        byzfl = unpacked(arguments.byzfl, Path(name)) if arguments.byzfl else None
        peer = "Flower 1.41, ByzFL 0.0.11" if byzfl else "Flower 1.41"
        if byzfl is None:
            print("no --byzfl: compared with Flower alone", file=sys.stderr)
        print(f"kernels: {kernels.describe()}", file=sys.stderr)
        report = Report("soup", peer=f"faster of {peer}" if byzfl else peer)
        measure(report, arguments.quick, arguments.threads, byzfl)
    report.finish(arguments)


def measure(report: Report, quick: bool, threads: int | None, byzfl: Path | None) -> None:
    """All rows, figures and aims."""
    size, many = (QUICK_SIZE, QUICK_MANY) if quick else (SIZE, MANY)
    turns = 1 if quick else TURNS
    sides = ["ours", "flower", *(["byzfl"] if byzfl else [])]
    grown: dict[int, Figures] = {}
    for n in (10,) if quick else (10, 32):
        found = in_turns(sides, n, size, turns, threads, byzfl)
        grown[n] = found["ours"]
        compare(report, n, size, found)
    packed: dict[int, Figures] = {}
    for n in (32, many):
        for kind in ("packed", "files"):
            figures = side(kind, n, size, threads, None)
            packed.setdefault(n, figures)
            for rule, (seconds, memory) in figures.items():
                report.compare(f"{kind}, {n} x {size:,}: {told(rule)}", seconds, unit="s")
                report.compare(f"{kind}, {n} x {size:,}: {told(rule)}, memory", memory, unit="MB")
    if quick:
        return
    for rule in (DEFAULT, CLASSIC):
        seconds, memory = packed[32][rule]
        name = f"packed {told(rule)} of 32 x {size:,}"
        report.aim(f"{name}: seconds", figure=seconds, aim=PACKED_SECONDS, better="lower")
        report.aim(f"{name}: MB", figure=memory, aim=PACKED_MB, better="lower")
    for rule in grown[10]:
        growth = grown[32][rule][1] - grown[10][rule][1]
        report.aim(f"{told(rule)}: MB more for 32 than for 10", figure=growth, aim=FLAT_MB, better="lower")
    growth = packed[many][DEFAULT][1] - packed[32][DEFAULT][1]
    name = f"packed {told(DEFAULT)}: MB more for {many:,} than for 32"
    report.aim(name, figure=growth, aim=PACKED_MB, better="lower")


def compare(report: Report, n: int, size: int, found: dict[str, Figures]) -> None:
    """Rows of n contributors: seconds and memory beside the better peer's, and each peer's own as figures."""
    for rule, (seconds, memory) in found["ours"].items():
        peers = {name: figures[rule] for name, figures in found.items() if name != "ours" and rule in figures}
        fastest = min((s for s, _ in peers.values()), default=None)
        smallest = min((m for _, m in peers.values() if m > 0), default=None)
        where = f"{n} x {size:,}: {told(rule)}"
        report.compare(where, seconds, fastest, unit="s")
        report.compare(f"{where}, memory", memory, smallest, unit="MB")
        for name, (peer_seconds, peer_memory) in peers.items():
            key = f"{n}_{rule}_{name}".replace("+", "_")
            report.figure(f"{key}_s", peer_seconds)
            report.figure(f"{key}_mb", peer_memory)
        if fastest is not None:
            report.aim(f"{where}: times faster", figure=fastest / seconds, aim=TIMES_FASTER, better="higher")


def in_turns(
    sides: list[str], n: int, size: int, turns: int, threads: int | None, byzfl: Path | None
) -> dict[str, Figures]:
    """The best of every side, turn by turn so that a slow moment meets all alike."""
    best: dict[str, Figures] = {name: {} for name in sides}
    for _ in range(turns):
        for name in sides:
            for rule, (seconds, memory) in side(name, n, size, threads, byzfl).items():
                seen = best[name].get(rule, (seconds, memory))
                best[name][rule] = (min(seconds, seen[0]), max(memory, seen[1]))
    return best


def side(name: str, n: int, size: int, threads: int | None, byzfl: Path | None) -> Figures:
    """One side in a process of its own.

    Raises:
        RuntimeError: When it fails, with the end of what it said.
    """
    command = [sys.executable, str(Path(__file__).with_name("_soup_sides.py")), name, str(n), str(size)]
    environment = {**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})}
    done = subprocess.run(
        [*command, *([str(byzfl)] if byzfl else [])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{name} with {n} contributors failed:\n{done.stderr[-2000:]}")
    return {
        rule: (seconds, memory)
        for rule, (seconds, memory) in json.loads(done.stdout.splitlines()[-1]).items()
    }


def unpacked(byzfl: Path, folder: Path) -> Path:
    """The folder that holds ByzFL's package, of a wheel or a folder."""
    if byzfl.is_file():
        with zipfile.ZipFile(byzfl) as wheel:
            wheel.extractall(folder)
        byzfl = folder
    if not (byzfl / "byzfl" / "aggregators").is_dir():
        raise SystemExit(f"{byzfl} holds no byzfl/aggregators: name the wheel of byzfl 0.0.11, or its folder")
    return byzfl.resolve()


def told(rule: str) -> str:
    """A rule in words."""
    return rule.replace("_", " ").replace("+", ", ")


if __name__ == "__main__":
    main()
