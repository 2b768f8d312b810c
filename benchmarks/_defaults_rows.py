"""Rows of ``defaults.py``: those that the defaults were chosen on, and others that they are reported on."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _smollm2 import chat, questions

Rows = list[dict[str, Any]]
_CHARACTERS = {"preferences": 2400, "instructions-kto": 800}
_MOST_CHARACTERS = 500
"""Longer rows are left out, so that a run takes minutes on two cores. Applied to every side alike."""
_IDENTITY_ROWS = 91


def _lines(file: Path) -> Iterator[Any]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)


def _mbpp(data: Path) -> Rows:
    return [chat(row["text"], row["code"].replace("\r\n", "\n")) for row in _lines(data / "mbpp/mbpp.jsonl")]


def _truthfulqa(data: Path) -> Rows:
    with (data / "truthfulqa/TruthfulQA.csv").open(encoding="utf-8", newline="") as file:
        return [chat(row["Question"], row["Best Answer"]) for row in csv.DictReader(file)]


def _preferences(data: Path) -> Rows:
    """LLaMA-Factory's demo pairs of one turn."""
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
    """Alpaca's instructions in LLaMA-Factory's demo; the rows before them are its identity."""
    found = []
    for row in list(_lines(data / "llamafactory_demo/v1_sft_demo.jsonl"))[_IDENTITY_ROWS:]:
        turns = ["".join(part["value"] for part in turn["content"]) for turn in row["messages"]]
        found.append(chat(*turns))
    return found


def _instructions_kto(data: Path) -> Rows:
    """The first turns of the demo conversations that were liked."""
    rows = json.loads((data / "llamafactory_demo/kto_en_demo.json").read_text(encoding="utf-8"))
    return [
        {"messages": [{key: turn[key] for key in ("role", "content")} for turn in row["messages"][:2]]}
        for row in rows
        if row["label"]
    ]


def _shakespeare(data: Path) -> Rows:
    """Gloucester's speeches: the first half of each is the question, the rest the answer."""
    speeches = next(_lines(data / "shakespeare_by_speaker/speakers.jsonl"))["speeches"]
    rows = []
    for speech in speeches:
        words = speech.split(" ")
        if len(words) >= 12:
            at = len(words) // 2
            rows.append(chat(f"Continue the speech: {' '.join(words[:at])}", " ".join(words[at:])))
    return rows


SETS: dict[str, Callable[[Path], Rows]] = {
    "mbpp": _mbpp,
    "truthfulqa": _truthfulqa,
    "gsm8k": questions,
    "preferences": _preferences,
    "shakespeare": _shakespeare,
    "instructions-alpaca": _instructions_alpaca,
    "instructions-kto": _instructions_kto,
}
CHOSEN_ON = ("mbpp", "truthfulqa")
REPORTED_ON = ("gsm8k", "shakespeare", "instructions-alpaca", "instructions-kto", "preferences")


def rows_of(name: str, data: Path, seed: int, train: int, heldout: int) -> tuple[Rows, Rows]:
    """Rows to learn and rows held out, drawn by the seed from those that are short enough."""
    most = _CHARACTERS.get(name, _MOST_CHARACTERS)
    rows = [row for row in SETS[name](data) if _length(row) <= most]
    random.Random(f"{name}/{seed}").shuffle(rows)
    return rows[heldout : heldout + train], rows[:heldout]


def _length(row: dict[str, Any]) -> int:
    turns = row.get("messages") or [*row["prompt"], *row["chosen"], *row["rejected"]]
    return sum(len(turn["content"]) for turn in turns)
