"""GRPO that generates on a vLLM against GRPO in one process, and TRL's GRPOTrainer: wall time and reward by step.

    python benchmarks/rollouts.py FOLDER [--python PYTHON] [--steps N] [--length TOKENS] [--seeds SEED ...]
        [--dtype float32] [--staleness N ...] [--quick] [--json]

FOLDER is SmolLM2-135M-Instruct (``_smollm2.py``). The task is that of ``verifiable_reward.py``: sums of one digit, LoRA
of rank 16, 32 answers a step. ``--length`` sets longer answers, so that generation dominates as in real runs. With
vLLM, the trainer and vLLM have one thread each; TRL and our own ``generate`` have two. The first step, which includes
vLLM's start, is left out. TRL does not support vLLM on a CPU, so it generates in process.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import torch
from _report import Report, options
from verifiable_reward import BATCH, GROUP, PATTERN, RANK, RATE, is_right, problems

HALF = 0.5
LAST = 5


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("model", metavar="FOLDER")
    parser.add_argument("--python", type=Path, help="the interpreter of vLLM's environment")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--length", type=int, default=32, help="maximum tokens of an answer")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--dtype", default="float32", help="the type in vLLM; the trainer's is float32")
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1])
    given = parser.parse_args()
    if given.quick:
        given.steps, given.length, given.staleness = 2, 4, [0]
    rows, _ = problems()
    report = Report("rollouts", peer="TRL's GRPOTrainer, in process")
    seconds: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    rewards: dict[str, list[float]] = {}
    for seed in given.seeds:
        sides: list[tuple[str, Any]] = [("generate", lambda seed=seed: ours(given, rows, seed, None))]
        sides += [
            (f"vllm, staleness {n}", lambda seed=seed, n=n: ours(given, rows, seed, n))
            for n in given.staleness
        ]
        sides.append(("TRL", lambda seed=seed: theirs(given, rows, seed)))
        for name, run in sides:
            (took, cpu), curve = run()
            seconds.setdefault(name, []).append(took)
            used.setdefault(name, []).append(cpu)
            rewards.setdefault(name, []).append(fmean(curve[-LAST:]))
            shown = " ".join(f"{value:.2f}" for value in curve)
            print(
                f"seed {seed}, {name}: {took:.1f} s, {cpu:.1f} CPU s for {given.steps} steps; reward {shown}",
                flush=True,
            )
    for name in seconds:
        if name != "TRL":
            report.compare(f"seconds, {name}", fmean(seconds[name]), fmean(seconds["TRL"]), better="lower")
            report.compare(f"CPU seconds, {name}", fmean(used[name]), fmean(used["TRL"]), better="lower")
            report.compare(
                f"reward of the last {LAST} steps, {name}",
                fmean(rewards[name]),
                fmean(rewards["TRL"]),
                better="higher",
            )
            if name != "generate":
                share = fmean(seconds[name]) / fmean(seconds["generate"])
                report.aim(f"wall time of {name}, share of generate's", share, HALF, better="lower")
    report.finish(given)


def ours(
    given: Any, rows: list[dict[str, str]], seed: int, staleness: int | None
) -> tuple[tuple[float, float], list[float]]:
    """Train with our trainer; return the seconds after the first step, scaled to all steps, and the reward by step."""
    from gym_fed import Trainer, TrainingConfig

    section: dict[str, Any] = {"max_completion_length": given.length, "num_generations": GROUP, "beta": 0.0}
    if staleness is not None:
        section["rollouts"] = {"engine": "vllm", "max_staleness": staleness, "dtype": given.dtype}
        if given.python is not None:
            section["rollouts"]["python"] = given.python
    ends: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as out:
        config = TrainingConfig(
            model=given.model,
            algorithm="grpo",
            finetuning="lora",
            lora={"r": RANK, "lora_alpha": 2 * RANK},
            chat_template="none",
            output_dir=str(Path(out, "run")),
            seed=seed,
            num_threads=2 if staleness is None else 1,
            dtype="float32",
            save_final=False,
            save_strategy="no",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_steps=given.steps,
            max_length=64,
            per_device_train_batch_size=BATCH,
            gradient_checkpointing=False,
            graders=[{"grader": "regex", "pattern": PATTERN, "column": "answer"}],
            grpo=section,
        )
        result = Trainer(config, on_step=lambda *_: ends.append(now())).train(dataset=rows)
    return per_step(ends), [entry["reward"] for entry in result.history if "reward" in entry]


def theirs(given: Any, rows: list[dict[str, str]], seed: int) -> tuple[tuple[float, float], list[float]]:
    """Train with TRL only; return the same figures as ``ours``."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    ends: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(now())

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
        return [is_right(text, right) for text, right in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
            reward_funcs=[reward],
            args=GRPOConfig(
                output_dir=out,
                seed=seed,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                max_steps=given.steps,
                per_device_train_batch_size=BATCH,
                num_generations=GROUP,
                max_completion_length=given.length,
                beta=0.0,
                bf16=False,
                gradient_checkpointing=False,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            processing_class=AutoTokenizer.from_pretrained(given.model),
            train_dataset=Dataset.from_list(rows),
            peft_config=LoraConfig(
                r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            callbacks=[Clock()],
        )
        trainer.train()
    return per_step(ends), [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def now() -> tuple[float, float]:
    """Return the wall time, and the CPU seconds of this process and of vLLM's processes."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return time.monotonic(), sum(each.user + each.system for each in times)


def per_step(ends: list[tuple[float, float]]) -> tuple[float, float]:
    """Return wall and CPU seconds of all steps, extrapolated from those after the first, which includes loading."""
    steps = len(ends) - 1
    (began, used), (ended, at_end) = ends[0], ends[-1]
    return (ended - began) / steps * len(ends), (at_end - used) / steps * len(ends)


if __name__ == "__main__":
    main()
