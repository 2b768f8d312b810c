"""`gym train` against the same work in plain TRL: tokens per second, peak memory, and time to the first step.

    python benchmarks/training.py [--quick] [--json] [--plot FILE] [--only sft-full ...]

Each side trains in processes of its own, in turn (ours, theirs, theirs, ours, ...), on one thread, from one folder with
the same rows, sizes, optimiser and seed; medians are reported. The model has 10 million random weights (gym-nano, of
one million, with --quick, where what a trainer does besides computing weighs most). Tokens a second count the steps
after the first two; start-up is the time from the process's birth to the end of its first step, imports included.
Losses of both sides are compared, so that it is the same work (GRPO draws its answers; there they are not).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _report import Report, options

TASKS = ("sft-full", "sft-lora", "dpo", "grpo")
STEPS, QUICK_STEPS = 24, 12
TURNS, QUICK_TURNS = 4, 2
BIG = {"hidden_size": 320, "num_hidden_layers": 8, "intermediate_size": 960, "heads": 5}
AIM_SPEED, AIM_START = 0.98, 1.0


def main() -> None:
    """Measure every task on both sides."""
    parser = options(__doc__)
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS, help="measure these alone")
    arguments = parser.parse_args()
    import trl

    report = Report("training", peer=f"TRL {trl.__version__}")
    with tempfile.TemporaryDirectory(prefix="gym-benchmark-") as name:
        folder = Path(name)
        model = "gym-nano" if arguments.quick else str(_big_model(folder / "model"))
        for task in arguments.only:
            _measure(report, task, model, folder, arguments.quick)
    report.finish(arguments)


def _measure(report: Report, task: str, model: str, folder: Path, quick: bool) -> None:
    turns = QUICK_TURNS if quick else TURNS
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    for turn in range(turns):
        for side in ("ours", "theirs") if turn % 2 == 0 else ("theirs", "ours"):
            work = {
                "side": side,
                "task": task,
                "model": model,
                "steps": QUICK_STEPS if quick else STEPS,
                "folder": str(folder / f"{task}-{side}-{turn}"),
            }
            runs[side].append(_child(work))
    if task != "grpo":
        ours, theirs = runs["ours"][0]["losses"], runs["theirs"][0]["losses"]
        far = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        if far > 1e-3:
            raise RuntimeError(f"{task}: the two sides do not do the same work: losses differ by {far}")

    def median(side: str, key: str) -> float:
        return float(statistics.median(run[key] for run in runs[side]))

    report.compare(
        f"{task}, tokens",
        median("ours", "tokens_per_second"),
        median("theirs", "tokens_per_second"),
        unit="/s",
        better="higher",
    )
    report.compare(f"{task}, peak memory", median("ours", "peak_mb"), median("theirs", "peak_mb"), unit="MB")
    report.compare(
        f"{task}, to the first step", median("ours", "first_step"), median("theirs", "first_step"), unit="s"
    )
    # Neighbouring runs share the machine's mood, so ratios are taken between them.
    pairs = list(zip(runs["ours"], runs["theirs"], strict=True))
    ratio = statistics.median(a["tokens_per_second"] / b["tokens_per_second"] for a, b in pairs)
    late = statistics.median(a["first_step"] - b["first_step"] for a, b in pairs)
    report.aim(f"{task}: tokens a second of plain TRL", ratio, AIM_SPEED, better="higher")
    report.aim(f"{task}: seconds later at the first step", late, AIM_START)


def _child(work: dict[str, Any]) -> dict[str, Any]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("_training_side.py")), json.dumps(work)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{work['task']}, {work['side']}: {done.stderr[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _big_model(folder: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from gym_fed.base.models import load_tokenizer

    torch.manual_seed(0)
    tokenizer = load_tokenizer("gym-nano")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=BIG["hidden_size"],
        num_hidden_layers=BIG["num_hidden_layers"],
        intermediate_size=BIG["intermediate_size"],
        num_attention_heads=BIG["heads"],
        num_key_value_heads=BIG["heads"],
        head_dim=BIG["hidden_size"] // BIG["heads"],
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    main()
