"""A single run of one side of ``training.py``, in its own process; the last line of output is JSON."""

from __future__ import annotations

import json
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import psutil

ROWS, BATCH, LENGTH, ANSWER = 256, 8, 96, 24
RATE = 1e-4


def main() -> None:
    """Train with the JSON settings in ``sys.argv[1]``; print speed, memory and losses."""
    warnings.simplefilter("ignore")
    work = json.loads(sys.argv[1])
    clock = Clock()
    (ours if work["side"] == "ours" else theirs)(work, clock)
    print(json.dumps(clock.report()))


class Clock:
    """Records the end of each step, in seconds since the process started, and the tokens trained on until then."""

    def __init__(self) -> None:
        self.born = psutil.Process().create_time()
        self.ends: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []
        self.tokens: list[float] = []

    def step(self) -> None:
        self.ends.append(time.time() - self.born)
        self.cpu.append(time.process_time())

    def report(self) -> dict[str, Any]:
        """Return tokens per second and per CPU second after two steps (steps if the trainer logs no tokens)."""
        seconds = self.ends[-1] - self.ends[1]
        tokens = (
            self.tokens[-1] - self.tokens[1] if len(self.tokens) == len(self.ends) else len(self.ends) - 2
        )
        return {
            "tokens_per_second": tokens / seconds,
            "tokens_per_cpu_second": tokens / (self.cpu[-1] - self.cpu[1]),
            "first_step": self.ends[0],
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "losses": self.losses,
        }


def rows_of(task: str) -> list[dict[str, Any]]:
    """Return conversations, pairs or prompts with the same questions."""
    from gym_fed.data import generate

    rows = generate("double", ROWS)
    if task.startswith("sft"):
        return rows
    prompts = [{"prompt": row["messages"][:-1], "answer": row["messages"][-1]["content"]} for row in rows]
    if task == "grpo":
        return prompts
    return [
        {
            "prompt": row["prompt"],
            "chosen": [{"role": "assistant", "content": row["answer"]}],
            "rejected": [{"role": "assistant", "content": row["answer"][::-1]}],
        }
        for row in prompts
    ]


def letters(text: str) -> float:
    """A reward that is cheap to compute."""
    return text.count("a") / max(1, len(text))


def ours(work: dict[str, Any], clock: Clock) -> None:
    """Train with ``gym_fed.Trainer``."""
    from gym_fed import Trainer, TrainingConfig
    from gym_fed.evaluation.graders.base import Grader, Sample

    class Letters(Grader):
        name = "letters"

        def grade(self, samples: list[Sample]) -> list[float]:  # type: ignore[override]
            return [letters(sample.completion) for sample in samples]

    task = work["task"]
    settings: dict[str, Any] = {
        "algorithm": task.split("-")[0],
        "model": work["model"],
        "output_dir": Path(work["folder"]),
        "max_steps": work["steps"],
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "max_length": LENGTH,
        "device": "cpu",
        "save_final": False,
    }
    if task == "sft-lora":
        settings |= {"finetuning": "lora", "lora": {"r": 8, "lora_alpha": 16}}
    if task == "dpo":
        settings["dpo"] = {"beta": 0.1, "precompute_ref_log_probs": False}
    if task == "grpo":
        settings["grpo"] = {"num_generations": 4, "max_completion_length": ANSWER}
    trainer = Trainer(
        TrainingConfig(**settings),
        graders=[Letters()] if task == "grpo" else [],
        on_step=lambda step, total, loss: clock.step(),
    )
    result = trainer.train(rows_of(task))
    clock.losses = result.losses
    clock.tokens = [
        entry["num_tokens"] for entry in result.history if "num_tokens" in entry and "loss" in entry
    ]


def theirs(work: dict[str, Any], clock: Clock) -> None:
    """Train with TRL's trainers only, with equivalent settings."""
    import os

    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    from gym_fed.base.models import NANO, nano_path

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.step()

    source = str(nano_path()) if work["model"] == NANO else work["model"]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="sdpa")
    tokenizer = AutoTokenizer.from_pretrained(source)
    common = {
        "output_dir": work["folder"],
        "max_steps": work["steps"],
        "per_device_train_batch_size": BATCH,
        "learning_rate": RATE,
        "lr_scheduler_type": "linear",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "seed": 0,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "weight_decay": 0.0,
    }
    data = Dataset.from_list(rows_of(work["task"]))
    extra: dict[str, Any] = {}
    if work["task"] == "sft-lora":
        from peft import LoraConfig

        extra["peft_config"] = LoraConfig(
            r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
        )
    if work["task"].startswith("sft"):
        arguments: Any = trl.SFTConfig(**common, max_length=LENGTH, assistant_only_loss=True)
        kind: Any = trl.SFTTrainer
    elif work["task"] == "dpo":
        arguments = trl.DPOConfig(**common, max_length=LENGTH, beta=0.1)
        kind = trl.DPOTrainer
    else:
        arguments = trl.GRPOConfig(**common, num_generations=4, max_completion_length=ANSWER, beta=0.0)
        kind = trl.GRPOTrainer
        extra["reward_funcs"] = lambda completions, **_: [letters(c[0]["content"]) for c in completions]
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[Steps()],
        **extra,
    )
    trainer.train()
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    clock.losses = [entry["loss"] for entry in history]
    clock.tokens = [entry["num_tokens"] for entry in history if "num_tokens" in entry]


if __name__ == "__main__":
    main()
