"""The rows of `smollm2.py`: GSM8K's questions with their answers, and preference pairs in LLaMA-Factory's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HELDOUT_QUESTIONS = 48
HELDOUT_PAIRS = 20
PAIR_LENGTH = 384
"""Longest pair that is used, in tokens: nothing is cut."""
_ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def questions(folder: Path) -> list[dict[str, Any]]:
    """Conversations of GSM8K's training set; the last ``HELDOUT_QUESTIONS`` are for measuring alone."""
    lines = (folder / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return [
        {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": row["answer"]},
            ]
        }
        for row in map(json.loads, lines)
    ]


def pairs(folder: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """The demo pairs that fit whole; the last ``HELDOUT_PAIRS`` are for measuring alone."""
    text = (folder / "llamafactory_demo" / "dpo_en_demo.json").read_text(encoding="utf-8")
    found = []
    for row in json.loads(text):
        prompt = [{"role": _ROLES[turn["from"]], "content": turn["value"]} for turn in row["conversations"]]
        pair = {
            "prompt": prompt,
            **{key: [{"role": "assistant", "content": row[key]["value"]}] for key in ("chosen", "rejected")},
        }
        if max(_length(tokenizer, prompt + pair[key]) for key in ("chosen", "rejected")) <= PAIR_LENGTH:
            found.append(pair)
    return found


def _length(tokenizer: Any, messages: list[dict[str, str]]) -> int:
    return len(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"])
