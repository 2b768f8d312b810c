"""Adapters on bases in 2 to 8 bits: memory of the weights, and held-out loss before and after the same LoRA steps.

    python benchmarks/base_bits.py [--quick] [--json] [--plot FILE] [--model FOLDER] [--steps N] [--only METHOD ...]
                                   [--bits N ...]

The model is SmolLM2-135M-Instruct (benchmarks/_smollm2.py) and the rows are GSM8K's: the first rows of the training
file are trained on, and 16 others are held out. Every base gets the same rows in the same order, 2 per step, truncated
to 128 tokens. Training uses LoRA of rank 8 on all linear layers, AdamW, learning rate 1e-3 and float32. The peer is the
base in float32. Methods whose package is missing are skipped and listed. --quick runs 4 steps of gym-nano on its own
tasks.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
from _report import SHARED, Report, options

from gym_fed.base.models import load_tokenizer
from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.registries import TUNING
from gym_fed.data import load_rows
from gym_fed.data.encoding import encode_rows
from gym_fed.data.generated import generate_mix
from gym_fed.training.model.loading import load_for_training
from gym_fed.training.model.quantization import uncast_adapters

PLAIN = "float32"
METHODS: dict[str, tuple[int, ...]] = {
    "bitsandbytes": (4, 8),
    "hqq": (2, 3, 4, 5, 6, 8),
    "torchao": (2, 3, 4, 5, 6, 8),
}
BATCH, LENGTH, HELD_OUT, RATE = 2, 128, 16, 1e-3


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", help="a folder of SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 3, 4, 5, 6, 8])
    given = parser.parse_args()
    model = "gym-nano" if given.quick else given.model or sys.exit("give --model, see benchmarks/_smollm2.py")
    steps = 4 if given.quick else given.steps
    tokenizer = load_tokenizer(model)
    learned, held = (encode_rows(tokenizer, part, max_length=LENGTH) for part in rows(given.quick, steps))
    report = Report("base_bits", peer=PLAIN)
    plain: dict[str, float] = {}
    cases = [(method, count) for method in given.only for count in METHODS[method] if count in given.bits]
    for method, bits in [("", 32), *cases]:
        if method and importlib.util.find_spec(method) is None:
            print(f"{method} is not installed, and left out", file=sys.stderr)
            continue
        name = f"{method} {bits} bits" if method else PLAIN
        figures = measured(model, method, bits, learned, held, steps, given.seed)
        print(
            name,
            *(f"{what} {value:.3f}" for what, value in figures.items()),
            file=sys.stderr,
            sep="; ",
            flush=True,
        )
        plain = plain or figures
        for what, value in figures.items():
            unit = "MiB" if what == "weights" else ""
            report.compare(f"{name}: {what}", ours=value, theirs=plain[what], unit=unit, better="lower")
    report.finish(given)


def rows(quick: bool, steps: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    if quick:
        made = list(generate_mix(["copy", "upper"], BATCH * steps + 8, seed=0))
        return made[: BATCH * steps], made[BATCH * steps :]
    columns = {"prompt": "question", "completion": "answer"}
    every = load_rows(SHARED / "data/gsm8k/train.jsonl", columns=columns)
    return every[: BATCH * steps], every[-HELD_OUT:]


def measured(
    model: str, method: str, bits: int, learned: Any, held: Any, steps: int, seed: int
) -> dict[str, float]:
    """Load and train one base; return the size of its weights in MiB, and the losses."""
    section = {"quantization": {"method": method, "bits": bits}} if method else {}
    config = TrainingConfig(model=model, finetuning="lora", lora={"r": 8}, device="cpu", seed=seed, **section)
    torch.manual_seed(seed)
    base, _ = load_for_training(config)
    size = weight_bytes(base) / 2**20
    adapted = TUNING.new("lora").prepare(base, config)
    before = loss(adapted, held)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE)
    adapted.train()
    with uncast_adapters(adapted):
        for step in range(steps):
            optimizer.zero_grad()
            batch_loss(adapted, learned[step * BATCH : (step + 1) * BATCH]).backward()
            optimizer.step()
    return {"weights": size, "loss before": before, "loss after": loss(adapted, held)}


def batch_loss(model: Any, rows: list[dict[str, list[int]]]) -> Any:
    """Return the mean loss of the labelled tokens of a padded batch."""
    length = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (length - len(row["input_ids"])) for row in rows])
    labels = torch.tensor([row["labels"] + [-100] * (length - len(row["labels"])) for row in rows])
    mask = torch.tensor(
        [[1] * len(row["input_ids"]) + [0] * (length - len(row["input_ids"])) for row in rows]
    )
    return model(input_ids=ids, attention_mask=mask, labels=labels).loss


@torch.no_grad()
def loss(model: Any, rows: list[dict[str, list[int]]]) -> float:
    model.eval()
    losses = [float(batch_loss(model, rows[at : at + BATCH])) for at in range(0, len(rows), BATCH)]
    return sum(losses) / len(losses)


def weight_bytes(model: Any) -> int:
    """Return the bytes of all weights as stored, including scales; a tied head counts once."""
    seen: dict[int, int] = {}

    def count(value: Any) -> None:
        if isinstance(value, dict):
            for each in value.values():
                count(each)
        elif hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                count(getattr(value, name))
        elif isinstance(value, torch.Tensor):
            seen[value.data_ptr()] = value.nbytes

    for module in model.modules():
        for value in (*module._parameters.values(), *module._buffers.values()):
            count(value)
            if (state := getattr(value, "quant_state", None)) is not None:  # bitsandbytes
                count(vars(state))
                count(vars(state.state2) if state.state2 is not None else {})
            count(getattr(value, "SCB", None))
        if type(module).__name__ == "HQQLinear":
            count({"weight": module.W_q, **module.meta})
    return sum(seen.values())


if __name__ == "__main__":
    main()
