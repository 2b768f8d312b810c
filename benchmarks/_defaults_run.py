"""The runs of ``defaults.py``: train by a set of values, and measure what was gained and what was lost.

A run is ``{"side", "rows", "seed", "train", "heldout", "values"}`` (numbers of rows; keys of ``TrainingConfig``). Its
result has the loss on held-out rows before and after (of preferences also the margin between
chosen and rejected answers), the loss on the retention set, and what the trainer did (``finetuning``, steps, the
highest learning rate), so that the table can assert which values ran.
"""

from __future__ import annotations

import copy
import math
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _defaults_rows import rows_of

MAX_LENGTH = {"preferences": 448}
LENGTH = 256


@cache
def base(name: str) -> Any:
    """The model that every run starts from."""
    from gym_fed.base.models import load_model

    return load_model(name)


@cache
def before(
    model: str, data: str, rows: str, seed: int, sizes: tuple[int, int]
) -> tuple[list[float], list[float], Any]:
    """Losses of the base: of held-out rows, of rejected answers, of the retention set."""
    loaded = base(model)
    return measured(loaded.model, loaded.tokenizer, data, rows, seed, sizes)


def measured(
    model: Any, tokenizer: Any, data: str, rows: str, seed: int, sizes: tuple[int, int]
) -> tuple[list[float], list[float], Any]:
    """Losses in nats per token, by row."""
    from gym_fed.evaluation.loss import row_losses
    from gym_fed.evaluation.retention import retention_items, retention_scores

    heldout = _for(tokenizer, rows_of(rows, Path(data), seed, *sizes)[1])
    length = MAX_LENGTH.get(rows, LENGTH)
    with torch.autocast("cpu", torch.bfloat16, enabled=_is_large(model)):
        own = row_losses(model, tokenizer, [_answered(row, "chosen") for row in heldout], max_length=length)
        other = []
        if "chosen" in heldout[0]:
            rejected = [_answered(row, "rejected") for row in heldout]
            other = row_losses(model, tokenizer, rejected, max_length=length)
        return own, other, retention_scores(model, tokenizer, retention_items(tokenizer))


def measure(model: str, data: str, run: dict[str, Any]) -> dict[str, Any]:
    """Train in a temporary folder; figures before and after."""
    from gym_fed import Trainer, TrainingConfig
    from gym_fed.evaluation.retention import compare_retention

    loaded, name, seed = base(model), run["rows"], run["seed"]
    sizes = (run["train"], run["heldout"])
    train = _for(loaded.tokenizer, rows_of(name, Path(data), seed, *sizes)[0])
    own, other, known = before(model, data, name, seed, sizes)
    tuned = copy.deepcopy(loaded.model)
    began = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        values = {
            "model": model, "output_dir": folder, "seed": seed, "num_threads": 1,
            "max_length": MAX_LENGTH.get(name, LENGTH), "save_final": False, "save_strategy": "no",
            "mixed_precision": "bf16" if _is_large(tuned) else "no", **run["values"],
        }  # fmt: skip
        trainer = Trainer(TrainingConfig(**values), model=tuned, tokenizer=loaded.tokenizer)
        result = trainer.train(dataset=train)
    seconds = time.process_time() - began
    own_after, other_after, known_after = measured(result.model, loaded.tokenizer, data, name, seed, sizes)
    kept = compare_retention(known, known_after)
    figures = {
        "before": _mean(own),
        "after": _mean(own_after),
        "retention_before": kept.before,
        "retention_after": kept.after,
        "retention_stderr": kept.stderr,
        "right_before": kept.right_before,
        "right_after": kept.right_after,
        "is_lost": kept.is_lost,
        "steps": result.steps,
        "tokens": result.num_tokens,
        "cpu_seconds": seconds,
        "finetuning": trainer.config.finetuning,
        "learning_rate": max(entry.get("learning_rate", 0.0) for entry in result.history),
        "train_rows": len(train),
        "heldout_rows": sum(not math.isnan(value) for value in own),
    }
    if other:
        figures["margin_before"] = _mean(other) - _mean(own)
        figures["margin_after"] = _mean(other_after) - _mean(own_after)
    return figures


def _is_large(model: Any) -> bool:
    return bool(sum(value.numel() for value in model.parameters()) > 10_000_000)


def _mean(values: list[float]) -> float:
    """Mean over the rows that have something to predict within the row length; of a short context some have not."""
    known = [value for value in values if not math.isnan(value)]
    assert 2 * len(known) >= len(values), f"{len(known)} of {len(values)} rows can be measured"
    return sum(known) / len(known)


def _for(tokenizer: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows as this tokenizer takes them: plain texts for one without a chat template."""
    if tokenizer.chat_template:
        return rows
    plain = []
    for row in rows:
        if "messages" in row:
            prompt, answer = (turn["content"] for turn in row["messages"])
            plain.append({"prompt": f"{prompt}\n", "completion": answer})
        else:
            texts = {key: row[key][0]["content"] for key in ("prompt", "chosen", "rejected")}
            plain.append({**texts, "prompt": f"{texts['prompt']}\n"})
    return plain


def _answered(row: dict[str, Any], key: str) -> dict[str, Any]:
    if "chosen" not in row:
        return row
    if isinstance(row["prompt"], str):
        return {"prompt": row["prompt"], "completion": row[key]}
    return {"messages": [*row["prompt"], *row[key]]}
