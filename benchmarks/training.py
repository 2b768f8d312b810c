"""`gym train` against the same work in plain TRL: tokens per second, peak memory, and time to the first step.

    python benchmarks/training.py [--quick] [--json] [--plot FILE] [--only sft-full ...]

Each side trains in separate processes, in turns (ours, theirs, theirs, ours, ...), on one thread, from the same folder
with the same rows, sizes, optimiser and seed; medians are reported. The compared figure is tokens per CPU second of the
process, with minimum and maximum; wall time is printed next to it. The model has 10 million random weights (with
--quick it is gym-nano with one million, where the trainer's overhead matters most). Tokens of the first two steps are
not counted. Start-up is the time from the start of the process to the end of its first step, including imports. The
losses of both sides are compared to check that they do the same work, except for GRPO, which samples its answers.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from _peer import Peer, in_turns, script
from _report import Report, options

TASKS = ("sft-full", "sft-lora", "dpo", "grpo")
STEPS, QUICK_STEPS = 24, 12
TURNS, QUICK_TURNS = 4, 2
BIG = {"hidden_size": 320, "num_hidden_layers": 8, "intermediate_size": 960, "heads": 5}
AIM_SPEED, AIM_START = 1.0, 1.0


def main() -> None:
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
    sides = ours, theirs = (
        Peer("ours", script("_training_side.py")),
        Peer("theirs", script("_training_side.py")),
    )

    def run(side: Peer) -> None:
        place = str(folder / f"{task}-{side.name}-{len(side.results)}")
        steps = QUICK_STEPS if quick else STEPS
        side.measure({"side": side.name, "task": task, "model": model, "steps": steps, "folder": place})

    in_turns(sides, QUICK_TURNS if quick else TURNS, run=run)
    if task != "grpo":
        losses = zip(ours.results[0]["losses"], theirs.results[0]["losses"], strict=True)
        far = max(abs(a - b) for a, b in losses)
        if far > 1e-3:
            raise RuntimeError(f"{task}: the two sides do not do the same work: losses differ by {far}")
    speeds = [side.values("tokens_per_second") for side in sides]
    report.compare(f"{task}, tokens", *speeds, unit="/s", better="higher")
    by_cpu = [side.values("tokens_per_cpu_second") for side in sides]
    report.compare(f"{task}, tokens", *by_cpu, unit="/CPU s", better="higher")
    pairs = list(zip(ours.results, theirs.results, strict=True))
    ratios = [a / b for a, b in zip(*by_cpu, strict=True)]
    report.compare(f"{task}, peak memory", *(side.values("peak_mb") for side in sides), unit="MB")
    report.compare(f"{task}, to the first step", *(side.values("first_step") for side in sides), unit="s")
    # neighbouring runs have similar machine conditions, so ratios are computed between them
    late = statistics.median(a["first_step"] - b["first_step"] for a, b in pairs)
    ratio = statistics.median(ratios)
    report.aim(f"{task}: tokens a CPU second of plain TRL", ratio, AIM_SPEED, better="higher")
    report.aim(f"{task}: seconds later at the first step", late, AIM_START)


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
