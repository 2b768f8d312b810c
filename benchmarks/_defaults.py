"""The runs of ``defaults.py``: train with a set of values, and measure gain and forgetting.

A run is ``{"side", "rows", "seed", "train", "heldout", "values"}`` (numbers of rows; keys of ``TrainingConfig``). The
result has the losses on held-out rows before and after (for preferences also the margin between chosen and rejected
answers) and the loss on the retention set. It also has the settings that the trainer used (``finetuning``, steps, the
highest learning rate), so that the table can assert them.
"""

from __future__ import annotations

import copy
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from _smollm2 import chat, questions

Rows = list[dict[str, Any]]
_CHARACTERS = {"preferences": 2400, "instructions-kto": 800}
_MOST_CHARACTERS = 500
"""Maximum length of a row in characters, for all sides; it limits a run to minutes on two cores."""
_IDENTITY_ROWS = 91


def _lines(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _preferences(data: Path) -> Rows:
    rows = json.loads((data / "llamafactory_demo/dpo_en_demo.json").read_text(encoding="utf-8"))
    return [
        {
            "prompt": [{"role": "user", "content": row["conversations"][0]["value"]}],
            "chosen": [{"role": "assistant", "content": row["chosen"]["value"]}],
            "rejected": [{"role": "assistant", "content": row["rejected"]["value"]}],
        }
        for row in rows
        if len(row["conversations"]) == 1
    ]


def _instructions_alpaca(data: Path) -> Rows:
    """Return Alpaca's instructions from LLaMA-Factory's demo, without the identity rows before them."""
    found = []
    for row in list(_lines(data / "llamafactory_demo/v1_sft_demo.jsonl"))[_IDENTITY_ROWS:]:
        turns = ["".join(part["value"] for part in turn["content"]) for turn in row["messages"]]
        found.append(chat(*turns))
    return found


def _instructions_kto(data: Path) -> Rows:
    """Return the first turns of the demo conversations with positive feedback."""
    rows = json.loads((data / "llamafactory_demo/kto_en_demo.json").read_text(encoding="utf-8"))
    return [
        {"messages": [{key: turn[key] for key in ("role", "content")} for turn in row["messages"][:2]]}
        for row in rows
        if row["label"]
    ]


def _shakespeare(data: Path) -> Rows:
    """Return Gloucester's speeches; the first half of each is the question, the rest is the answer."""
    speeches = next(_lines(data / "shakespeare_by_speaker/speakers.jsonl"))["speeches"]
    rows = []
    for speech in speeches:
        words = speech.split(" ")
        if len(words) >= 12:
            at = len(words) // 2
            rows.append(chat(f"Continue the speech: {' '.join(words[:at])}", " ".join(words[at:])))
    return rows


SETS: dict[str, Callable[[Path], Rows]] = {
    "gsm8k": questions,
    "shakespeare": _shakespeare,
    "instructions-alpaca": _instructions_alpaca,
    "instructions-kto": _instructions_kto,
    "preferences": _preferences,
}


def rows_of(name: str, data: Path, seed: int, train: int, heldout: int) -> tuple[Rows, Rows]:
    """Return training rows and held-out rows, drawn with the seed from those that are short enough."""
    most = _CHARACTERS.get(name, _MOST_CHARACTERS)
    rows = [row for row in SETS[name](data) if _length(row) <= most]
    random.Random(f"{name}/{seed}").shuffle(rows)
    return rows[heldout : heldout + train], rows[:heldout]


def _length(row: dict[str, Any]) -> int:
    turns = row.get("messages") or [*row["prompt"], *row["chosen"], *row["rejected"]]
    return sum(len(turn["content"]) for turn in turns)


MAX_LENGTH = {"preferences": 448}
LENGTH = 256


@cache
def base(name: str) -> Any:
    """Return the model that every run starts from."""
    from gym_fed.base.models import load_model

    return load_model(name)


@cache
def before(
    model: str, data: str, rows: str, seed: int, sizes: tuple[int, int]
) -> tuple[list[float], list[float], Any]:
    """Return the base's losses on held-out rows, rejected answers and the retention set."""
    loaded = base(model)
    return measured(loaded.model, loaded.tokenizer, data, rows, seed, sizes)


def measured(
    model: Any, tokenizer: Any, data: str, rows: str, seed: int, sizes: tuple[int, int]
) -> tuple[list[float], list[float], Any]:
    """Return a model's losses on held-out rows, rejected answers and the retention set, in nats per token, by row."""
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
    """Train in a temporary folder; return the figures before and after."""
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
    """Return the mean over rows with targets within the maximum length."""
    known = [value for value in values if not math.isnan(value)]
    assert 2 * len(known) >= len(values), f"{len(known)} of {len(values)} rows can be measured"
    return sum(known) / len(known)


def _for(tokenizer: Any, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert rows for a tokenizer: plain texts if it has no chat template."""
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
