"""Compare the estimates of `gym train --plan` with real runs: peak memory of a fresh process, and time of a step.

Each run is a separate process with one thread, on rows of `max_length` tokens. The memory is the process's `VmHWM`. The
time is the CPU seconds of the median step after the first, which other processes affect less than wall time; the
calibration uses the same statistic. The models are gym-nano and, if `--smollm2` or the variable GYM_SMOLLM2 names its
folder, SmolLM2-135M-Instruct. `--process` measures the memory of a process without a model, for the constants
`PROCESS_BYTES` and `ADAPTER_PROCESS_BYTES` in `gym_fed/training/planning/memory.py`. `ALLOCATOR_BYTES` is the mean
excess of gym-nano's peaks over the plan; it is then validated on SmolLM2's peaks.
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

AIM = 0.15
CASES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("full, checkpointing", {"gradient_checkpointing": True}),
    ("lora", {"finetuning": "lora"}),
    ("lora, checkpointing", {"finetuning": "lora", "gradient_checkpointing": True}),
    ("full, sgd", {"optimizer": "sgd"}),
    ("full, adafactor", {"optimizer": "adafactor"}),
]


TOY: dict[str, Any] = {
    "algorithm": "pretrain",
    "packing": False,
    "max_length": 8,
    "per_device_train_batch_size": 1,
    "max_steps": 2,
    "num_threads": 1,
    "device": "cpu",
    "save_final": False,
    "model_init": {
        "tokenizer": "gym-nano",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "max_position_embeddings": 8,
    },
}
"""A model of a few kilobytes, so that its run measures the process alone."""

PROCESSES: dict[str, dict[str, Any]] = {
    "full, read from a folder": {},
    "lora": {"finetuning": "lora"},
    "lora, 4 bits": {"finetuning": "lora", "quantization": {}},
    "lora, 8 bits": {"finetuning": "lora", "quantization": {"bits": 8}},
}
"""Values of the runs on the written model."""


def measure_process() -> dict[str, int]:
    """Return the bytes of fresh processes that imported a run's packages and trained a negligibly small model.

    An adapter needs a trained model, so the first run writes one and the others read it.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder) / "model")
        found = {"full": run({**TOY, "output_dir": model, "save_final": True})["peak"]}
        read = {key: value for key, value in TOY.items() if key != "model_init"} | {"model": model}
        for name, changes in PROCESSES.items():
            found[name] = run({**read, **changes, "output_dir": str(Path(folder) / name)})["peak"]
    return {name: round(value) for name, value in found.items()}


def measure(values: dict[str, Any]) -> dict[str, float]:
    """Train for a few steps in this process; return memory and time."""
    from gym_fed import Trainer, TrainingConfig

    config = TrainingConfig(**values)
    words = "lorem ipsum dolor sit amet " * (config.max_length // 5 + 1)
    rows = [{"text": f"{number} {words}"} for number in range(config.per_device_train_batch_size * 4)]
    moments: list[float] = []
    Trainer(config, on_step=lambda *_: moments.append(time.thread_time())).train(rows)
    steps = [after - before for before, after in pairwise(moments)]
    status = Path("/proc/self/status").read_text(encoding="ascii")
    peak = int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) * 1024
    return {"peak": peak, "seconds": statistics.median(steps)}


def run(values: dict[str, Any]) -> dict[str, float]:
    """Run ``measure`` in a separate process."""
    found: dict[str, float] = child([*script("plan.py"), "--measure", json.dumps(values)])
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--process", action="store_true", help="measure processes without a model alone")
    parser.add_argument("--smollm2", default=os.environ.get("GYM_SMOLLM2"))
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(json.loads(arguments.measure))))
        return

    if arguments.process:
        for name, size in measure_process().items():
            print(f"a process without a model, {name}: {size / (1 << 20):.0f} MiB")
        return

    import torch

    from gym_fed import TrainingConfig
    from gym_fed.training.planning.plan import plan_run

    torch.set_num_threads(1)
    models = [("gym-nano", 256, 16)]
    if arguments.smollm2 and not arguments.quick:
        models.append((arguments.smollm2, 256, 2))
    report = Report("plan", peer="the run")
    kept: dict[str, list[float]] = {}
    print(
        f"{'model and case':44} {'peak, GiB':>10} {'planned':>8} {'off':>6} {'step, s':>8} {'planned':>8} {'off':>6}"
    )
    for model, length, rows in models:
        for case, changes in CASES[:2] if arguments.quick else CASES[: 6 if model == "gym-nano" else 4]:
            with tempfile.TemporaryDirectory() as folder:
                values = {
                    "model": model,
                    "algorithm": "pretrain",
                    "packing": False,
                    "max_length": length,
                    "per_device_train_batch_size": rows,
                    "max_steps": 4 if model == "gym-nano" else 3,
                    "num_threads": 1,
                    "device": "cpu",
                    "save_final": False,
                    "output_dir": str(Path(folder) / "run"),
                    **changes,
                }
                found = run(values)
                plan = plan_run(TrainingConfig(**values))
            assert plan.seconds is not None
            name = f"{Path(model).name}: {case}"
            memory, seconds = plan.memory.peak / found["peak"] - 1, plan.seconds / found["seconds"] - 1
            allocated = plan.memory.peak - plan.memory.allocator
            kept.setdefault(Path(model).name, []).append(found["peak"] - allocated)
            report.figure(f"{name}, memory off by", round(memory, 4))
            report.figure(f"{name}, time off by", round(seconds, 4))
            print(
                f"{name:44} {found['peak'] / (1 << 30):10.2f} {plan.memory.peak / (1 << 30):8.2f} {memory:+6.0%} "
                f"{found['seconds']:8.2f} {plan.seconds:8.2f} {seconds:+6.0%}",
                flush=True,
            )
    for name, sizes in kept.items():
        print(
            f"{name}: kept by the allocator, mean of {len(sizes)} runs: {statistics.mean(sizes) / (1 << 20):.0f} MiB"
        )
    for kind in ("memory", "time"):
        worst = max(abs(value) for name, value in report.figures.items() if f"{kind} off" in name)
        report.aim(f"{kind} off by at most", worst, AIM)
    report.finish(arguments)


if __name__ == "__main__":
    main()
