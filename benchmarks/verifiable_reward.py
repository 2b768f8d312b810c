"""GRPO with a verifiable reward on SmolLM2-135M: sums of one digit, on held-out problems, next to TRL's GRPOTrainer.

    python benchmarks/verifiable_reward.py FOLDER [--seeds SEED ...] [--steps N] [--quick] [--json]

FOLDER is SmolLM2-135M-Instruct (``_smollm2.py``). A prompt is a sum such as ``3+4=`` as plain text, and an answer is
rewarded if its first number is correct. Of the 81 problems, 56 are for training and 25 are held out, the same for every
seed. The reward before and after is the mean over four answers to each held-out problem, sampled at temperature 1. Both
sides train LoRA factors of rank 16 for the same number of steps with 32 answers each.
"""

from __future__ import annotations

import random
import re
import tempfile
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from _report import Report, options

RATE, RANK, GROUP, BATCH, ANSWER = 5e-4, 16, 8, 32, 3
PATTERN = r"^\s*(\d+)"
ANSWERS = 4


def main() -> None:
    parser = options(__doc__, seeds=[1, 2])
    parser.add_argument("model", metavar="FOLDER")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds, arguments.steps = [1], 1
    torch.set_num_threads(1)
    train, held_out = problems()
    report = Report("verifiable_reward", peer="TRL's GRPOTrainer")
    after: dict[str, list[float]] = {"ours": [], "theirs": []}
    rises: list[float] = []
    for seed in arguments.seeds:
        for side, run in (("ours", ours), ("theirs", theirs)):
            began = time.monotonic()
            before, reached = run(arguments.model, train, held_out, seed, arguments.steps)
            after[side].append(reached)
            rises += [reached - before] if side == "ours" else []
            seconds = time.monotonic() - began
            print(
                f"seed {seed}, {side}: held-out reward {before:.3f} -> {reached:.3f}, {seconds:.0f} s",
                flush=True,
            )
    report.compare(
        "held-out reward after training", fmean(after["ours"]), fmean(after["theirs"]), better="higher"
    )
    if len(rises) > 1:
        report.compare("its standard deviation over seeds", stdev(after["ours"]), stdev(after["theirs"]))
    report.aim("the held-out reward rises for every seed", min(rises), 0.05, better="higher")
    report.finish(arguments)


def problems() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return training problems and held-out problems, with ``prompt`` and ``answer``."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    random.Random(0).shuffle(pairs)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in pairs]
    return rows[:56], rows[56:]


def is_right(text: str, answer: str) -> float:
    match = re.match(PATTERN, text)
    return float(match is not None and match[1] == answer)


@torch.inference_mode()
def held_out_reward(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    """Return the mean reward of sampled answers to all problems; all prompts have the same length."""
    model.eval()
    torch.manual_seed(1234)
    ids = tokenizer([row["prompt"] for row in rows], return_tensors="pt")["input_ids"]
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=ANSWER,
        num_return_sequences=ANSWERS,
        pad_token_id=tokenizer.pad_token_id,
    )
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    return fmean(is_right(text, rows[place // ANSWERS]["answer"]) for place, text in enumerate(texts))


def ours(
    folder: str, train: list[dict[str, str]], held_out: list[dict[str, str]], seed: int, steps: int
) -> tuple[float, float]:
    """Train with ``gym_fed.Trainer``; return the reward on held-out problems before and after."""
    from gym_fed import Trainer, TrainingConfig
    from gym_fed.base.models import load_model

    loaded = load_model(folder, device="cpu")
    before = held_out_reward(loaded.model, loaded.tokenizer, held_out)
    with tempfile.TemporaryDirectory() as out:
        config = TrainingConfig(
            model=folder,
            algorithm="grpo",
            finetuning="lora",
            lora={"r": RANK, "lora_alpha": 2 * RANK},
            chat_template="none",
            output_dir=str(Path(out, "run")),
            seed=seed,
            num_threads=1,
            dtype="float32",
            save_final=False,
            save_strategy="no",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_steps=steps,
            max_length=64,
            per_device_train_batch_size=BATCH,
            gradient_checkpointing=False,
            graders=[{"grader": "regex", "pattern": PATTERN, "column": "answer"}],
            grpo={"max_completion_length": ANSWER, "num_generations": GROUP, "beta": 0.0},
        )
        result = Trainer(config, model=loaded.model, tokenizer=loaded.tokenizer).train(dataset=train)
    return before, held_out_reward(result.model, loaded.tokenizer, held_out)


def theirs(
    folder: str, train: list[dict[str, str]], held_out: list[dict[str, str]], seed: int, steps: int
) -> tuple[float, float]:
    """Train with TRL only; return the same figures as ``ours``."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = held_out_reward(model, tokenizer, held_out)

    def reward(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
        return [is_right(text, right) for text, right in zip(completions, answer, strict=True)]

    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=[reward],
            args=GRPOConfig(
                output_dir=out,
                seed=seed,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                max_steps=steps,
                per_device_train_batch_size=BATCH,
                num_generations=GROUP,
                max_completion_length=ANSWER,
                beta=0.0,
                bf16=False,
                gradient_checkpointing=False,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
            ),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(train),
            peft_config=LoraConfig(
                r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
        trainer.train()
    return before, held_out_reward(trainer.model, tokenizer, held_out)


if __name__ == "__main__":
    main()
