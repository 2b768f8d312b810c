"""Merging a round: our rules against Flower's strategies and ByzFL's rules on the same updates, in seconds and memory.

    python benchmarks/soup.py [--byzfl WHEEL_OR_FOLDER] [--part floats|packed ...] [--contributors N ...]
                              [--threads N] [--runs N] [--quick] [--json] [--plot FILE]

There are 10 and 32 contributors with 5 million float32 each, a fifth of whom count as malicious. Our side uses the
kernels and plans of a merge, on float32 in memory. Flower's is ``aggregate_train`` on replies in memory, with ten
arrays or one. ByzFL's rules are called on a torch matrix, a numpy matrix, and a column-major numpy matrix. A peer's
rule counts in its fastest form: all forms first run at a tenth of the size, and those that take at most 1.5 times as
long as the fastest run in full. ``packed`` merges opened ``.gymdelta`` files of sign bits into tensors in memory, which
no peer supports.

Every side runs in separate processes, with as many runs for a peer as for us, in turns whose order alternates. The
table has the median of the runs, with minimum and maximum below it. Memory is the peak growth of the process, without
inputs. All sides must give the same result, to a millionth of its largest value, or the script fails. ByzFL's NNM is
left out if it would need more than half of the free memory (17 GB for 32 contributors).

ByzFL is not a dependency, since its package installs CUDA. Download it with ``pip download byzfl==0.0.11 --no-deps``
and pass the wheel, or a folder with its content; without it, its columns are absent. The results of three rules may
differ. ByzFL's Krum and Multi-Krum sum n - f - 1 neighbours; ours, Flower's and the paper's sum n - f - 2. Flower's
Bulyan scores all updates once; the paper's (El Mhamdi et al. 2018, sec. 4) and ours recompute the scores after each
selected update.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import zipfile
from functools import partial
from pathlib import Path

import numpy as np
from _peer import Peer, child, in_turns, script
from _report import Report, options
from gym_quant import kernels

SIZE, QUICK_SIZE = 5_000_000, 500_000
MANY, QUICK_MANY = 1000, 100
RUNS = 3
FORMS = {"flower": ("flower-ten", "flower-one"), "byzfl": ("byzfl-torch", "byzfl-numpy", "byzfl-columns")}
CLOSE = 1.5
"""Maximum time, relative to the fastest form at a tenth of the size, of forms that are measured in full."""
SAME = 1e-6
ANOTHER = {("byzfl", "krum"), ("byzfl", "multi_krum"), ("flower", "bulyan")}
DEFAULT, CLASSIC = "byzantine_robust", "norm_cap+nnm+trimmed_mean"
PACKED_SECONDS, PACKED_MB = 0.050, 64.0
TIMES_FASTER = 3.0
FLAT_MB = 16.0
PARTS = ("floats", "packed")
Runs = dict[str, list[tuple[float, float]]]
"""Seconds and megabytes of every run, by rule."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--byzfl", type=Path, metavar="WHEEL_OR_FOLDER", help="ByzFL 0.0.11, to compare with")
    parser.add_argument("--threads", type=int, metavar="N", help="of every side; default: all cores")
    parser.add_argument("--runs", type=int, metavar="N", help=f"runs of every side; {RUNS}, with --quick 1")
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS, help="one of the two")
    parser.add_argument(
        "--contributors",
        type=int,
        nargs="+",
        metavar="N",
        help="float updates at once; 10 32, with --quick 10",
    )
    arguments = parser.parse_args()
    counts = arguments.contributors or ([10] if arguments.quick else [10, 32])
    with tempfile.TemporaryDirectory() as name:
        byzfl = unpacked(arguments.byzfl, Path(name)) if arguments.byzfl else None
        if byzfl is None:
            print("no --byzfl: compared with Flower alone", file=sys.stderr)
        print(f"kernels: {kernels.describe()}", file=sys.stderr)
        report = Report("soup", peer="faster of Flower 1.41, ByzFL 0.0.11" if byzfl else "Flower 1.41")
        bench = Bench(Path(name) / "answers", arguments.threads, byzfl)
        runs = arguments.runs or (1 if arguments.quick else RUNS)
        if "floats" in arguments.part:
            floats(report, bench, arguments.quick, runs, counts)
        if "packed" in arguments.part:
            packed(report, bench, arguments.quick, runs)
    report.finish(arguments)


class Bench:
    """Starts sides in separate processes."""

    def __init__(self, answers: Path, threads: int | None, byzfl: Path | None) -> None:
        self.answers, self.byzfl = answers, byzfl
        self._environment = {"OMP_NUM_THREADS": str(threads or os.cpu_count() or 1)}
        answers.mkdir()

    def run(
        self, side: str, n: int, size: int, rules: set[str] | None = None, keep: bool = True
    ) -> dict[str, tuple[float, float]]:
        """Return seconds and megabytes of one run of each rule; ``keep`` stores the results for comparison."""
        words = [side, str(n), str(size), str(self.answers) if keep else "-"]
        words.append("all" if rules is None else ",".join(sorted(rules)))
        words += [str(self.byzfl)] if self.byzfl else []
        found = child(script("_soup_sides.py", *words), self._environment, f"{side} with {n} contributors")
        print(f"{side}, {n} x {size:,}: done", file=sys.stderr, flush=True)
        return {rule: (s, mb) for rule, (s, mb) in found.items()}

    def require_same(self) -> None:
        compared = 0
        for file in sorted(self.answers.glob("*.npy")):
            side, rule = file.stem.split(" ", 1)
            if side == "ours" or (side.partition("-")[0], rule) in ANOTHER:
                continue
            ours, theirs = np.load(self.answers / f"ours {rule}.npy"), np.load(file)
            far = float(np.abs(ours - theirs).max() / np.abs(ours).max())
            if not far <= SAME:
                raise RuntimeError(f"{side}: {rule} differs from ours by {far:.2g} of its largest value")
            compared += 1
        if not compared:
            raise RuntimeError("no answer of a peer was compared with ours")
        for file in self.answers.glob("*.npy"):
            file.unlink()


def floats(report: Report, bench: Bench, quick: bool, runs: int, counts: list[int]) -> None:
    """Report rows, figures and aims of float updates, compared with the peers."""
    size = QUICK_SIZE if quick else SIZE
    grown: dict[int, Runs] = {}
    for n in counts:
        found = sides_of(bench, n, size, runs)
        bench.require_same()
        grown[n] = found["ours"]
        compare(report, n, size, found)
    few, many = min(counts), max(counts)
    for rule in grown[few] if many > few and not quick else ():
        growth = memory(grown[many][rule]) - memory(grown[few][rule])
        report.aim(f"{in_words(rule)}: MB more for {many} than for {few}", growth, FLAT_MB)


def packed(report: Report, bench: Bench, quick: bool, runs: int) -> None:
    """Report rows, figures and aims of opened files of sign bits."""
    size, many = (QUICK_SIZE, QUICK_MANY) if quick else (SIZE, MANY)
    in_memory: dict[int, Runs] = {}
    for n in (32, many):
        side = Peer("packed", partial(bench.run, "packed", n, size))
        in_turns([side], runs)
        own = by_rule(side)
        in_memory[n] = own
        for rule, measured in own.items():
            where = f"packed, {n} x {size:,}: {in_words(rule)}"
            report.compare(where, [s for s, _ in measured], unit="s")
            report.compare(f"{where}, memory", memory(measured), unit="MB")
    if quick:
        return
    for rule in (DEFAULT, CLASSIC):
        name = f"packed {in_words(rule)} of 32 x {size:,}"
        report.aim(f"{name}: seconds", seconds(in_memory[32][rule]), PACKED_SECONDS)
        report.aim(f"{name}: MB", memory(in_memory[32][rule]), PACKED_MB)
    growth = memory(in_memory[many][DEFAULT]) - memory(in_memory[32][DEFAULT])
    name = f"packed {in_words(DEFAULT)}: MB more for {many:,} than for 32"
    report.aim(name, growth, PACKED_MB)


def compare(report: Report, n: int, size: int, found: dict[str, Runs]) -> None:
    """Report the rows for n contributors, next to the better peer, and every form's seconds and memory as figures."""
    for rule, ours in found["ours"].items():
        peers = {name: runs[rule] for name, runs in found.items() if name != "ours" and rule in runs}
        fastest = min(peers, key=lambda name: seconds(peers[name]), default=None)
        smallest = min((memory(runs) for runs in peers.values() if memory(runs) > 0), default=None)
        where = f"{n} x {size:,}: {in_words(rule)}" + (f" (peer: {fastest})" if fastest else "")
        theirs = [s for s, _ in peers[fastest]] if fastest else None
        report.compare(where, [s for s, _ in ours], theirs, unit="s")
        report.compare(f"{where}, memory", memory(ours), smallest, unit="MB")
        for name, runs in peers.items():
            key = f"{n}_{rule}_{name}".replace("+", "_").replace("-", "_")
            report.figure(f"{key}_s", seconds(runs))
            report.figure(f"{key}_mb", memory(runs))
        if theirs is not None:
            times = statistics.median(theirs) / seconds(ours)
            report.aim(f"{where}: times faster", times, TIMES_FASTER, better="higher")


def seconds(runs: list[tuple[float, float]]) -> float:
    return statistics.median(s for s, _ in runs)


def memory(runs: list[tuple[float, float]]) -> float:
    return max(mb for _, mb in runs)


def sides_of(bench: Bench, n: int, size: int, runs: int) -> dict[str, Runs]:
    """Return all runs of every side, in turns, so that slow periods of the machine affect all sides."""
    chosen: dict[str, set[str] | None] = {"ours": None, **close_forms(bench, n, size)}
    sides = [Peer(side, partial(bench.run, side, n, size, rules)) for side, rules in chosen.items()]
    in_turns(sides, runs)
    return {side.name: by_rule(side) for side in sides}


def by_rule(side: Peer) -> Runs:
    return {rule: [result[rule] for result in side.results] for rule in side.results[0]}


def close_forms(bench: Bench, n: int, size: int) -> dict[str, set[str]]:
    """Return the rules in which each form of a peer may be its fastest."""
    chosen: dict[str, set[str]] = {}
    for peer, forms in FORMS.items():
        if peer == "byzfl" and bench.byzfl is None:
            continue
        tried = {form: bench.run(form, n, size // 10, keep=False) for form in forms}
        times = {form: {rule: s for rule, (s, _) in found.items()} for form, found in tried.items()}
        for form in forms:
            rules = {
                rule
                for rule, time in times[form].items()
                if time <= CLOSE * min(other[rule] for other in times.values() if rule in other)
            }
            if rules:
                chosen[form] = rules
    return chosen


def unpacked(byzfl: Path, folder: Path) -> Path:
    """Return the folder with ByzFL's package, from a wheel or a folder."""
    if byzfl.is_file():
        with zipfile.ZipFile(byzfl) as wheel:
            wheel.extractall(folder)
        byzfl = folder
    if not (byzfl / "byzfl" / "aggregators").is_dir():
        raise SystemExit(f"{byzfl} holds no byzfl/aggregators: name the wheel of byzfl 0.0.11, or its folder")
    return byzfl.resolve()


def in_words(rule: str) -> str:
    return rule.replace("_", " ").replace("+", ", ")


if __name__ == "__main__":
    main()
