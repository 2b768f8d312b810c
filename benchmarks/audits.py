"""How far honest re-runs of training steps are apart on other CPU kernels, and how far one false token is.

    python benchmarks/audits.py [--part distances|overhead] [--cases CASE ...] [--shared FOLDER] [--quick] [--json]

``distances``: a training run of stories260K on Shakespeare is recorded for an audit. Every step is repeated in
processes that restrict the CPU's kernels or the number of threads, and with one changed token, one changed row, or the
rows of another speaker. A case is LoRA or full tuning, in float32 or in bf16 (``mixed_precision``). ``overhead``: CPU
time of training with and without recording, alternating in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _report import Report, options

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

KERNELS: dict[str, dict[str, str]] = {
    "same kernels": {},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "no vectors": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
    },
    "no vectors, 2 threads": {
        "ATEN_CPU_CAPABILITY": "default",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "AUDIT_THREADS": "2",
    },
    "2 threads": {"AUDIT_THREADS": "2"},
}
CHEATS = ("one token", "one row", "another speaker")
CASES = ("lora,no", "lora,bf16", "full,no", "full,bf16")
STEPS, QUICK_STEPS = 10, 3
REPEATS, OVERHEAD_STEPS = 5, 20
TOLERANCE = 1e-3


def trainer(
    shared: Path, tuning: str, precision: str, steps: int, folder: Path, observer: Any, **more: Any
) -> Any:
    """Return the project's trainer for one round of a recipe."""
    from gym_fed.base.models import load_model
    from gym_fed.config.hub.round_training import round_training
    from gym_fed.config.hub.task import TrainingRecipe
    from gym_fed.training.trainer import Trainer

    recipe = TrainingRecipe(
        algorithm="pretrain",
        finetuning=tuning,
        max_steps=steps,
        learning_rate=2e-3,
        per_device_train_batch_size=4,
        max_length=64,
        seed=100,
    )
    loaded = load_model(str(shared / "models" / "stories260K"), dtype="float32", device="cpu")
    config = round_training(recipe, 1, folder, "cpu").model_copy(update={"mixed_precision": precision})
    return Trainer(config, model=loaded.model, tokenizer=loaded.tokenizer, observer=observer, **more)


def rows_of(shared: Path, speaker: int) -> list[dict[str, Any]]:
    from _sequences import speeches

    return speeches(shared, speaker + 1)[speaker]


def record(shared: Path, tuning: str, precision: str, steps: int, folder: Path) -> None:
    """Train and record every step in ``folder``."""
    from gym_fed.training.audits.recorder import StepRecorder

    observer = StepRecorder(folder / "record", 1 << 30)
    trainer(shared, tuning, precision, steps, folder / "run", observer).train(dataset=rows_of(shared, 0))


def repeat(shared: Path, tuning: str, precision: str, steps: int, folder: Path, cheat: str) -> list[float]:
    """Repeat every recorded step; return the distances."""
    from safetensors.torch import load_file

    from gym_fed.training.audits.recorder import read_leaves, state_path
    from gym_fed.training.audits.replay import StepReplay

    leaves = read_leaves(folder / "record")
    batches = {step: leaf["batch"] for step, leaf in enumerate(leaves)}
    numbers = range(1, steps + 1)
    replay = StepReplay(
        numbers, batches, lambda step, _: load_file(state_path(folder / "record", step)), TOLERANCE
    )
    if cheat in CHEATS[:2]:
        replay.attach = relabelling(replay, cheat)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as run:
        one = trainer(shared, tuning, precision, steps, Path(run) / "run", replay)
        one.train(dataset=rows_of(shared, 1 if cheat == CHEATS[2] else 0))
    return [replay.report.distances[step] for step in numbers]


def relabelling(replay: Any, cheat: str) -> Any:
    """Return an ``attach`` function that changes one label, or all labels of one row."""
    attach = type(replay).attach

    def attached(inner: Any) -> None:
        compute = inner.training_step

        def training_step(model: Any, inputs: Any, *args: Any, **named: Any) -> Any:
            labels = inputs["labels"].clone()
            where = labels[0] != -100
            if cheat == "one token":
                where[:5] = where[6:] = False
            labels[0] = labels[0].where(~where, (labels[0] + 1) % 512)
            return compute(model, {**inputs, "labels": labels}, *args, **named)

        inner.training_step = training_step
        attach(replay, inner)

    return attached


def child(arguments: list[str]) -> None:
    """Run ``record`` or ``repeat`` in this process, whose environment restricts the kernels."""
    import torch

    torch.set_num_threads(int(os.environ.get("AUDIT_THREADS", "1")))
    what, shared, tuning, precision, steps, folder, cheat = arguments
    given = (Path(shared), tuning, precision, int(steps), Path(folder))
    if what == "record":
        record(*given)
    else:
        print(
            json.dumps(
                {"distances": repeat(*given, cheat), "kernels": torch.backends.cpu.get_cpu_capability()}
            )
        )


def started(what: str, given: list[str], cheat: str, environment: dict[str, str]) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", what, *given, cheat]
    done = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1]) if what == "repeat" else {}


def distances(report: Report, shared: Path, quick: bool, cases: Sequence[str]) -> None:
    steps = QUICK_STEPS if quick else STEPS
    for tuning, precision in (case.split(",") for case in cases):
        name = f"{tuning}, {'float32' if precision == 'no' else precision}"
        honest, false = 0.0, float("inf")
        with tempfile.TemporaryDirectory() as folder:
            given = [str(shared), tuning, precision, str(steps), folder]
            started("record", given, "", {})
            for kernels, environment in KERNELS.items():
                found = started("repeat", given, "", environment)
                first, *later = found["distances"]
                print(
                    f"{name}, {kernels} ({found['kernels']}): step 1 {first:.1e}, later at most {max(later):.1e}"
                )
                report.figure(f"{name}: {kernels}, largest distance", max(found["distances"]))
                honest = max(honest, *found["distances"])
            for cheat in CHEATS:
                found = started("repeat", given, cheat, {})
                low, high = min(found["distances"]), max(found["distances"])
                print(f"{name}, {cheat}: {low:.1e} to {high:.1e}")
                report.figure(f"{name}: {cheat}, smallest distance", low)
                false = min(false, low)
        if precision == "no":
            report.aim(f"{name}: honest steps within the tolerance", honest, TOLERANCE, "lower")
            report.aim(f"{name}: false steps outside", false, TOLERANCE, "higher")


def overhead(report: Report, shared: Path, quick: bool) -> None:
    """Compare the time per step with and without recording, without the first step."""
    import torch

    from gym_fed.training.audits.recorder import StepRecorder

    torch.set_num_threads(1)
    rows = rows_of(shared, 0)
    for tuning in ("lora", "full"):
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(2 if quick else REPEATS):
            for recorded in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    times: list[float] = []
                    observer = StepRecorder(Path(folder) / "record", 1 << 30) if recorded else None
                    one = trainer(
                        shared, tuning, "no", OVERHEAD_STEPS, Path(folder) / "run", observer,
                        on_step=lambda step, total, loss, times=times: times.append(time.process_time()),
                    )  # fmt: skip
                    one.train(dataset=rows)
                    seconds[recorded].append((times[-1] - times[0]) / (len(times) - 1))
        plain, with_record = statistics.median(seconds[False]), statistics.median(seconds[True])
        print(f"{tuning}: {1e3 * plain:.1f} ms a step, {1e3 * with_record:.1f} ms with the record")
        report.figure(f"{tuning}: ms per step", 1e3 * plain)
        report.aim(f"{tuning}: overhead of the record", with_record / plain - 1.0, 0.06, "lower")


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2:])
        return
    parser: argparse.ArgumentParser = options(__doc__, "shared")
    parser.add_argument("--part", choices=("distances", "overhead"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES, help="tuning and mixed_precision")
    arguments = parser.parse_args()
    report = Report("audits")
    if arguments.part in (None, "distances"):
        distances(report, arguments.shared, arguments.quick, arguments.cases)
    if arguments.part in (None, "overhead"):
        overhead(report, arguments.shared, arguments.quick)
    report.finish(arguments)


if __name__ == "__main__":
    main()
