"""Evaluation of 32 one-bit variants in one pass, compared with 32 runs of lm-eval's own model; and the suite `tiny`.

    python benchmarks/evaluation.py [--quick] [--json] [--plot FILE] [--shared FOLDER] [--part variants|tiny]

``variants``: stories260K (or gym-nano, if it is missing) and one-bit deltas of all its matrices, on a log-likelihood
task (ARC-Easy, else `tiny_choice`), a six-shot task (TruthfulQA mc1, if available) and a generation task
(`tiny_arithmetic`). Each side has its own process and one thread. Our side builds the prompts once, scores all
variants, and computes all metrics. The peer is `evaluate` with `HFLM`: every variant is merged and loaded before the
clock starts, and the batch size is the fastest of seven on other rows. Sides alternate. Answers are compared row by
row, and a difference stops the benchmark. Times are CPU seconds, which other work on the machine affects least; "the
model alone" excludes prompts and metrics on both sides. ``tiny``: the entire suite on gym-nano with `Evaluator`.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from _peer import Peer, in_turns, script
from _report import Report, options

SIDES = ("ours", "theirs")
NATS = 5e-4
"""Tolerance in nats, since HFLM sums exponentials in float32 and merged weights are rounded once more."""


def main() -> None:
    parser = options(__doc__, "shared")
    parser.add_argument("--part", choices=("variants", "tiny"), action="append", help="default: both")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    from importlib.metadata import version

    report = Report("evaluation", peer=f"HFLM, lm-eval {version('lm-eval')}")
    with tempfile.TemporaryDirectory(prefix="gym-evaluation-") as name:
        if "variants" in (arguments.part or ["variants"]):
            variants(report, arguments, Path(name))
        if "tiny" in (arguments.part or ["tiny"]):
            tiny(report)
    report.finish(arguments)


def variants(report: Report, arguments: Any, folder: Path) -> None:
    """Evaluate all variants on both sides, in turns."""
    stories, data = arguments.shared / "models/stories260K", arguments.shared / "data"
    is_here = stories.is_dir() and (data / "arc_easy").is_dir()
    settings: dict[str, Any] = {
        "model": str(stories) if is_here else "gym-nano",
        "variants": 4 if arguments.quick else 32,
        "tasks": {"choices": "arc_easy" if is_here else "tiny_choice", "texts": "tiny_arithmetic"},
        "rows": {"choices": 50 if is_here else 24, "texts": 36},
        "data": str(data) if is_here else None,
        "folder": str(folder),
        "threads": 1,
        "batch_sizes": {},
    }
    if is_here:
        settings["tasks"]["examples"] = "truthfulqa_mc1"
        settings["rows"]["examples"] = 6
    if arguments.quick:
        settings["rows"] = {kind: min(16, count) for kind, count in settings["rows"].items()}
    settings["batch_sizes"] = side("batch").measure(settings)
    print(f"batch sizes of the peer: {settings['batch_sizes']}", file=sys.stderr)
    sides = [side(name) for name in SIDES]
    in_turns(sides, 1 if arguments.quick else arguments.repeats, settings)
    turns = {peer.name: peer.results for peer in sides}
    for kind in settings["tasks"]:
        for both in zip(*turns.values(), strict=True):
            require_same(kind, settings, *(turn[kind] for turn in both))
    for kind, task in settings["tasks"].items():
        what = f"{settings['variants']} variants, {settings['rows'][kind]} rows of {task}"
        for key, label in (("seconds", "all"), ("model_seconds", "the model alone")):
            ours, theirs = ([turn[kind][key] for turn in turns[name]] for name in SIDES)
            report.compare(f"{what}: {label}", ours, theirs, unit="CPU s")
            ratios = sorted(their / our for our, their in zip(ours, theirs, strict=True))
            report.figure(f"{kind} {label} least ratio", ratios[0])
            report.figure(f"{kind} {label} most ratio", ratios[-1])
            if label == "all":
                report.aim(f"{task} times faster", statistics.median(ratios), 5, better="higher")
        report.compare(f"{what}: forwards", *(turns[name][0][kind]["forwards"] for name in SIDES))
    peaks = [max(peer.values("peak_mb")) for peer in sides]
    report.compare("peak memory of the process", *peaks, unit="MB")


def side(name: str) -> Peer:
    """Return a side that runs in separate processes."""
    return Peer(name, script("_evaluation_sides.py", name), {"DISABLE_MULTIPROC": "1"})


def require_same(kind: str, settings: dict[str, Any], ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Check that every variant answered every row, and that both sides have the same answers."""
    said = ours["said"]
    if not len(said) == len(theirs["said"]) == settings["variants"]:
        raise RuntimeError(f"{kind}: {len(said)} variants, theirs {len(theirs['said'])}")
    if len({json.dumps(rows) for rows in said.values()}) != len(said):
        raise RuntimeError(f"{kind}: two variants say the same to all rows")
    for name, rows in said.items():
        if not len(rows) == len(theirs["said"][name]) == settings["rows"][kind]:
            raise RuntimeError(f"{kind}: {name}: {len(rows)} rows")
        for number, (mine, other) in enumerate(zip(rows, theirs["said"][name], strict=True)):
            same = mine == other
            if isinstance(mine, list):
                off = max(abs(one - their) for one, their in zip(mine, other, strict=True))
                same = off < NATS and mine.index(max(mine)) == other.index(max(other))
            if not same:
                raise RuntimeError(f"{kind}: {name}: row {number}: {mine}, theirs {other}")


def tiny(report: Report) -> None:
    """Run the suite with `Evaluator` in a separate process."""
    found = side("tiny").measure()
    report.compare("tiny on gym-nano, 500 rows", found["seconds"], unit="s")
    report.compare("tiny on gym-nano: peak memory", found["peak_mb"], unit="MB")
    report.figure("tiny rows", found["rows"])
    report.aim("tiny on gym-nano in a minute", found["seconds"], 60)


if __name__ == "__main__":
    main()
