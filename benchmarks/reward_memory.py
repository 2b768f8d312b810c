"""Memory and tokens per second of GRPO and GSPO against PPO, with our own trainers and equal batches.

    python benchmarks/reward_memory.py [--smollm2 FOLDER] [--repeats N] [--cells FILE] [--quick] [--json]

Every cell runs in its own process with one thread, with AdamW in float32 and no reference model. stories260K is trained
fully, and SmolLM2 with LoRA of rank 8, the default for a model of its size. A step has 8 answers of up to 24 tokens,
each used once. The memory is the process's `VmHWM`. Tokens per second are a step's answer tokens divided by its CPU
seconds, averaged over the steps after the first. PPO additionally needs its critic: weights, gradients and optimiser
state. `ppo, frozen critic body` trains only the critic's head.

A second table has Qwen3-4B, computed by `gym train --plan` for a GPU with checkpointing: 8 answers of up to 512 tokens,
with and without a reference model (`beta`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from _peer import child, script
from _report import Report, options

CLAIM = 0.40
"""Claimed reduction, the smaller one of 40% and 60%."""
PEER = "ppo"
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": ("ppo", {}),
    "ppo, frozen critic body": ("ppo", {"train_critic_body": False}),
    "grpo": ("grpo", {}),
    "gspo": ("gspo", {}),
}
ANSWERS, LENGTH = 8, 24


def config_values(model: str, cell: str, folder: str, steps: int, seed: int) -> dict[str, Any]:
    algorithm, own = CELLS[cell]
    return {
        "model": model,
        "algorithm": algorithm,
        "finetuning": "full" if "stories" in Path(model).name else "lora",
        "output_dir": folder,
        "seed": seed,
        "num_threads": 1,
        "device": "cpu",
        "max_length": 128,
        "save_final": False,
        "save_strategy": "no",
        "max_steps": steps,
        "per_device_train_batch_size": ANSWERS,
        "graders": [{"grader": "regex", "pattern": "[a-m]"}],
        "logging_steps": 1,
        algorithm: {
            "max_completion_length": LENGTH,
            "num_generations": 4,
            "beta": 0.0,
            "num_iterations": 1,
            **own,
        },
    }


def measure(model: str, cell: str, steps: int, seed: int) -> dict[str, float]:
    """Train for a few steps in this process; return memory and speed."""
    from gym_fed import Trainer, TrainingConfig

    moments: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(**config_values(model, cell, str(Path(folder, "run")), steps, seed))
        trainer = Trainer(config, on_step=lambda *_: moments.append(time.thread_time()))
        result = trainer.train([{"prompt": f"Once upon a time there were {n} friends"} for n in range(32)])
    lengths = [e["completions/mean_length"] for e in result.history if "completions/mean_length" in e]
    seconds = statistics.mean(after - before for before, after in pairwise(moments))
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024
    return {"peak": peak, "rate": ANSWERS * statistics.mean(lengths) / seconds}


def planned_table(report: Report) -> None:
    """Print the planned peaks of Qwen3-4B."""
    from methods import QWEN3_4B

    from gym_fed import TrainingConfig
    from gym_fed.training.planning.plan import plan_run

    print("Qwen3-4B, planned, GiB: " + ", ".join(CELLS))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN3_4B), encoding="utf-8")
        for finetuning in ("full", "lora"):
            for beta in (0.0, 0.05):
                peaks = []
                for cell, (algorithm, own) in CELLS.items():
                    values = config_values(folder, cell, "unused", 1, 0) | {
                        "device": "cuda",
                        "max_length": 1024,
                        "finetuning": finetuning,
                        "gradient_checkpointing": True,
                    }
                    values[algorithm] |= {"max_completion_length": 512, "beta": beta, **own}
                    plan = plan_run(TrainingConfig(**values), device="cuda", timed=False)
                    peaks.append(plan.memory.peak / (1 << 30))
                saved = 1 - peaks[list(CELLS).index("grpo")] / peaks[0]
                shown = ", ".join(f"{peak:.1f}" for peak in peaks)
                print(f"{finetuning}, beta {beta:g}: {shown}; grpo saves {saved:.0%}")
                report.figure(f"Qwen3-4B planned, {finetuning}, beta {beta:g}: grpo saves", round(saved, 3))


def main() -> None:
    parser = options(__doc__, "cells", "shared")
    parser.add_argument("--smollm2", default=os.environ.get("GYM_SMOLLM2"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*json.loads(arguments.measure))))
        return

    from gym_fed import TrainingConfig
    from gym_fed.training.planning.plan import plan_run

    cells: dict[str, dict[str, float]] = {}
    if arguments.cells and arguments.cells.exists():
        cells = json.loads(arguments.cells.read_text(encoding="utf-8"))
    repeats = 1 if arguments.quick else arguments.repeats
    models = [str(arguments.shared / "models" / "stories260K")]
    if arguments.smollm2 and not arguments.quick:
        models.append(arguments.smollm2)
    report = Report("reward_memory", peer=PEER)
    for model in models:
        name = Path(model).name
        found: dict[str, list[dict[str, float]]] = {cell: [] for cell in CELLS}
        for seed in range(repeats):
            for cell in CELLS:
                words = json.dumps([model, cell, arguments.steps, seed])
                if words not in cells:
                    cells[words] = child([*script("reward_memory.py"), "--measure", words])
                    if arguments.cells:
                        arguments.cells.write_text(json.dumps(cells), encoding="utf-8")
                found[cell].append(cells[words])
        medians = {
            c: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for c, runs in found.items()
        }
        print(
            f"{name:24} {'peak, GiB':>18} {'of ppo':>7} {'planned':>8} {'answer tokens/s':>20} {'of ppo':>7}"
        )
        for cell, runs in found.items():
            values = config_values(model, cell, "unused", arguments.steps, 0)
            planned = plan_run(TrainingConfig(**values), timed=False).memory.peak / (1 << 30)
            peaks, rates = (
                [run[key] / scale for run in runs] for key, scale in (("peak", 1 << 30), ("rate", 1))
            )
            memory, speed = (medians[cell][key] / medians[PEER][key] for key in ("peak", "rate"))
            print(
                f"{cell:24} {statistics.median(peaks):8.3f} ({min(peaks):.3f}-{max(peaks):.3f}) {memory:6.0%} "
                f"{planned:8.2f} {statistics.median(rates):9.1f} ({min(rates):.1f}-{max(rates):.1f}) {speed:6.0%}",
                flush=True,
            )
            report.figure(f"{name}, {cell}: peak of ppo's", round(memory, 4))
            report.figure(f"{name}, {cell}: tokens per second of ppo's", round(speed, 4))
        for cell in ("grpo", "gspo"):
            saved = 1 - medians[cell]["peak"] / medians[PEER]["peak"]
            report.aim(f"{name}, {cell}: less memory than ppo", saved, CLAIM, better="higher")
    planned_table(report)
    report.finish(arguments)


if __name__ == "__main__":
    main()
