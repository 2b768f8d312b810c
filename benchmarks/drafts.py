"""Speculative decoding with a draft: tokens per second with and without, for 1, 2, 4 and 8 users.

    python benchmarks/drafts.py [--model FOLDER] [--noise SHARE] [--format bfloat16] [--users 1 2] [--runs 3]

The model is SmolLM2-135M-Instruct unless a folder is given. Its published weights lie on a 4-bit grid, so a draft that
is the model itself in 4 bits is nearly always right; ``--noise 0.01`` adds 1% of each matrix's standard deviation, as
in a model whose weights are not on such a grid. Users ask different questions and get 128 tokens, greedily. Both sides
run in this process, on one thread, in turns. The figure is tokens per CPU second, including prompts. The script asserts
that the answers are the same, and that proposals were made where the draft has room for them.
"""

from __future__ import annotations

import shutil
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from _peer import spread
from _report import Report, key, options, show
from _smollm2 import read_gguf
from safetensors.torch import load_file, save_file

from gym_fed.config.serving import ServingConfig
from gym_fed.serving.engine.request import GenerationRequest, SamplingParams
from gym_fed.serving.setup import Serving, open_serving

QUESTIONS = (
    "Explain how a bicycle stays upright when it moves.",
    "Write a short story about a lighthouse keeper and a storm.",
    "What is photosynthesis? Explain it for a child.",
    "List the steps to bake bread at home.",
    "Describe the causes of the French Revolution.",
    "How does a refrigerator work?",
    "Give advice to someone learning to play the piano.",
    "Write a letter to a friend about a trip to the mountains.",
)
NEW = 128


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", type=Path, default=Path("runs/smollm2"), help="model folder")
    parser.add_argument(
        "--noise", type=float, default=0.0, metavar="SHARE", help="of each matrix's deviation"
    )
    parser.add_argument(
        "--format", default="bfloat16", help="the base's linear layers: bfloat16, int8 or int4"
    )
    parser.add_argument("--users", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    read_gguf(arguments.model)
    model = noisy(arguments.model, arguments.noise) if arguments.noise else arguments.model
    report, rows = Report("drafts", peer="without a draft"), []
    with ExitStack() as stack:
        sides = {
            kind: stack.enter_context(opened(model, arguments.format, kind)) for kind in ("off", "draft")
        }
        for users in arguments.users:
            rates, share = measured(sides, users, 1 if arguments.quick else arguments.runs)
            rows.append([str(users), *(spread(rates[kind]) for kind in sides), share])
            report.compare(
                f"{users} users, {arguments.format}",
                rates["draft"],
                rates["off"],
                unit="tokens/CPU s",
                better="higher",
            )
            for kind, values in rates.items():
                report.figure(key(f"{users} users {kind} tokens cpu s"), sorted(values)[len(values) // 2])
    show("tokens per CPU second, median (least-most)", ("users", "off", "draft", "accepted"), rows)
    report.finish(arguments)


def noisy(model: Path, share: float) -> Path:
    """Write a copy of the model with noise on its matrices, unless it exists."""
    folder = model.with_name(f"{model.name}-noise-{share:g}")
    if folder.exists():
        return folder
    shutil.copytree(model, folder)
    tensors, generator = load_file(model / "model.safetensors"), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.ndim == 2:
            wide = tensor.float()
            noise = share * wide.std() * torch.randn(wide.shape, generator=generator)
            tensors[name] = (wide + noise).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def opened(model: Path, base_format: str, kind: str) -> Serving:
    engine = {"speculative": kind, "prefix_cache": False}
    return open_serving(
        ServingConfig(
            base=str(model), dtype="bfloat16", base_format=base_format, num_threads=1, engine=engine
        )
    )


def measured(sides: dict[str, Serving], users: int, runs: int) -> tuple[dict[str, list[float]], str]:
    """Return the rates of both sides by run, after one that is not counted, and the accepted share of proposals."""
    rates: dict[str, list[float]] = {kind: [] for kind in sides}
    answers: dict[str, list[tuple[int, ...]]] = {}
    share = "-"
    for run in range(runs + 1):
        for kind, serving in sides.items():
            before = serving.engine.stats()
            answers[kind], rate = turn(serving, users)
            after = serving.engine.stats()
            if run:
                rates[kind].append(rate)
            if proposed := after.proposed_tokens - before.proposed_tokens:
                share = f"{(after.accepted_tokens - before.accepted_tokens) / proposed:.0%} of {proposed}"
        if answers["off"] != answers["draft"]:
            raise SystemExit(f"{users} users: the answers with a draft are others")
    if users <= 2 and share == "-":
        raise SystemExit(f"{users} users: nothing was proposed")
    return rates, share


def turn(serving: Serving, users: int) -> tuple[list[tuple[int, ...]], float]:
    prompts = [
        serving.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        for question in QUESTIONS[:users]
    ]
    sampling: Any = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    cpu = time.process_time()
    answers = [
        serving.engine.submit(GenerationRequest(serving.tokenizer.encode(prompt), sampling, user=f"u{user}"))
        for user, prompt in enumerate(prompts)
    ]
    ids = [answer.result().token_ids for answer in answers]
    return ids, users * NEW / (time.process_time() - cpu)


if __name__ == "__main__":
    main()
