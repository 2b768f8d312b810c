"""One run of one side of `smollm2.py`, in a process of its own; its last line of output is JSON.

Both sides train on the same rows for the same steps: AdamW, linear schedule, bf16 autocast over float32 weights, no
gradient checkpointing (TRL's default would be slower), one thread. The trained model or adapter is saved.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

BETA = 0.1
LENGTH = {"sft": 256, "dpo": 384}


def main() -> None:
    """Train as ``sys.argv[1]`` (JSON) says; print losses, CPU seconds and the peak of memory."""
    warnings.simplefilter("ignore")
    work = json.loads(sys.argv[1])
    rows = json.loads(Path(work["rows"]).read_text(encoding="utf-8"))
    clock = Clock()
    losses = (ours if work["side"] == "ours" else trl_alone)(work, rows, clock)
    print(json.dumps({"losses": losses, **clock.report()}))


class Clock:
    """Processor time at the end of every step."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def step(self) -> None:
        self.ends.append(time.process_time())

    def report(self) -> dict[str, float]:
        """Seconds a step after the first, which warms up; seconds of the whole process; its peak in MB."""
        return {
            "step_seconds": (self.ends[-1] - self.ends[0]) / (len(self.ends) - 1),
            "cpu_seconds": time.process_time(),
            "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }


def ours(work: dict[str, Any], rows: list[dict[str, Any]], clock: Clock) -> list[float]:
    """By ``gym_fed.Trainer``."""
    from gym_fed import Trainer, TrainingConfig

    task = work["task"]
    settings: dict[str, Any] = {
        "algorithm": task,
        "model": work["model"],
        "output_dir": Path(work["folder"]),
        "max_steps": work["steps"],
        "per_device_train_batch_size": work["batch"],
        "learning_rate": work["rate"],
        "max_length": LENGTH[task],
        "seed": work["seed"],
        "device": "cpu",
        "num_threads": 1,
        "mixed_precision": "bf16",
        "logging_steps": 1,
    }
    if work["tuning"] == "lora":
        settings |= {"finetuning": "lora", "lora": {"r": 8, "lora_alpha": 16}}
    if task == "dpo":
        settings["dpo"] = {"beta": BETA, "precompute_ref_log_probs": False}
    trainer = Trainer(TrainingConfig(**settings), on_step=lambda step, total, loss: clock.step())
    return trainer.train(rows).losses


def trl_alone(work: dict[str, Any], rows: list[dict[str, Any]], clock: Clock) -> list[float]:
    """By TRL's ``SFTTrainer``: the answers alone are learnt, from rows of prompt and completion."""
    import torch
    import trl
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            clock.step()

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        work["model"], dtype=torch.float32, attn_implementation="sdpa"
    )
    tokenizer = AutoTokenizer.from_pretrained(work["model"])
    arguments = trl.SFTConfig(
        output_dir=work["folder"],
        max_steps=work["steps"],
        per_device_train_batch_size=work["batch"],
        learning_rate=work["rate"],
        lr_scheduler_type="linear",
        weight_decay=0.0,
        max_length=LENGTH["sft"],
        seed=work["seed"],
        bf16=True,
        use_cpu=True,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to="none",
        logging_steps=1,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]
    lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trainer = trl.SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
        callbacks=[Steps()],
        peft_config=lora if work["tuning"] == "lora" else None,
    )
    trainer.train()
    trainer.save_model(work["folder"])
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    main()
