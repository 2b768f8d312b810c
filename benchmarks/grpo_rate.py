"""The learning rate of rewards for a small pre-trained model: what GRPO gains, and what the model forgets.

    python benchmarks/grpo_rate.py [--rates RATE ...] [--seeds SEED ...] [--steps N] [--quick] [--json]
        [--shared FOLDER]

stories260K continues the first twelve words of stories; an answer is rewarded if it contains a happy word. A step has
32 answers, eight per prompt. The reward is reported as the mean of the first four and of the last eight steps.
Forgetting is the increase of the loss on other stories, in nats per token. The peer is the default learning rate for a
pre-trained model of this size.
"""

from __future__ import annotations

import copy
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from _report import Report, options

from gym_fed import Trainer, TrainingConfig
from gym_fed.base.models import load_model
from gym_fed.evaluation.loss import row_losses

DEFAULT = 1e-4
GRADER = {"grader": "regex", "pattern": "(?i)(happy|smile|laugh|fun)"}
FIRST, LAST = 4, 8


def main() -> None:
    parser = options(__doc__, "shared", seeds=[1, 2])
    parser.add_argument("--rates", type=float, nargs="+", default=[DEFAULT, 5e-5])
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rates, arguments.seeds, arguments.steps = [DEFAULT], [1], 3
    torch.set_num_threads(1)
    report = Report("grpo_rate", peer=f"{DEFAULT:g}")
    stories = arguments.shared / "data" / "tinystories"
    lines = (stories / "stories_clean.jsonl").read_text(encoding="utf-8").splitlines()
    words = [json.loads(line)["text"].split(" ") for line in lines]
    prompts = [{"prompt": " ".join(one[:12])} for one in words if len(one) > 40][:300]
    excerpt = (stories / "tinystories_valid_excerpt.txt").read_text(encoding="utf-8")
    others = [{"text": one.strip()[:700]} for one in excerpt.split("<|endoftext|>") if len(one.strip()) > 200]
    model = str(arguments.shared / "models" / "stories260K")
    found: dict[float, list[tuple[float, float, float]]] = {}
    for seed in arguments.seeds:
        for rate in arguments.rates:
            first, last, rise = measure(model, prompts, others[:40], rate, seed, arguments.steps)
            found.setdefault(rate, []).append((first, last, rise))
            print(
                f"seed {seed}, {rate:g}: reward {first:.3f} -> {last:.3f}, stories {rise:+.4f} nats",
                flush=True,
            )
    means = {rate: [fmean(values) for values in zip(*runs, strict=True)] for rate, runs in found.items()}
    for rate, (_, last, rise) in means.items():
        peer = means.get(DEFAULT, [None] * 3)
        report.compare(f"{rate:g}: reward of the last steps", last, peer[1], better="higher")
        report.compare(f"{rate:g}: rise of the loss on stories", rise, peer[2], unit="nats")
    report.finish(arguments)


def measure(
    model: str,
    prompts: list[dict[str, str]],
    others: list[dict[str, str]],
    rate: float,
    seed: int,
    steps: int,
) -> tuple[float, float, float]:
    """Return the reward of the first and of the last steps, and the increase of the loss on ``others``."""
    loaded = load_model(model)
    before = _mean_loss(loaded.model, loaded.tokenizer, others)
    with tempfile.TemporaryDirectory() as folder:
        config = TrainingConfig(
            model=model,
            algorithm="grpo",
            output_dir=str(Path(folder, "run")),
            seed=seed,
            num_threads=1,
            max_length=128,
            save_final=False,
            save_strategy="no",
            learning_rate=rate,
            lr_scheduler_type="constant",
            max_steps=steps,
            per_device_train_batch_size=32,
            graders=[GRADER],
            grpo={"max_completion_length": 24, "num_generations": 8},
            logging_steps=1,
        )
        trainer = Trainer(config, model=loaded.model, tokenizer=loaded.tokenizer)
        result = trainer.train(dataset=copy.deepcopy(prompts))
    rewards = [entry["reward"] for entry in result.history if "reward" in entry]
    rise = _mean_loss(result.model.eval(), loaded.tokenizer, others) - before
    return fmean(rewards[:FIRST]), fmean(rewards[-LAST:]), rise


def _mean_loss(model: Any, tokenizer: Any, rows: list[dict[str, str]]) -> float:
    losses = row_losses(model, tokenizer, rows, max_length=384)
    return fmean(loss for loss in losses if loss == loss)


if __name__ == "__main__":
    main()
