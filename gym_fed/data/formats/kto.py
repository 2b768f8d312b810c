"""Unpaired preferences for KTO: an answer with ``label`` (LLaMA-Factory's ``kto_tag``), true for a good answer."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats._turns import (
    PROMPT_KEYS,
    alpaca_question,
    alpaca_row,
    conversation,
    prompt_and_answers,
    require_learned,
    split_answer,
)
from gym_fed.data.formats.base import BadRow, Format, Raw, string, system_of, with_context


class KtoFormat(Format):
    """``{"prompt", "completion", "label"}``."""

    order = 20
    kind = "unpaired"

    @classmethod
    def matches(cls, row: Raw) -> bool:
        if "kto_tag" in row:
            return True
        if row.keys() >= {"prompt", "completion", "label"} and label_of(row["label"]) is not None:
            return True  # the layout of TRL, also for tables with labels 0 and 1
        answered = row.keys() & {"messages", "conversations", "instruction", "query", "completion"}
        return bool(answered) and isinstance(row.get("label"), bool)

    def read(self, row: Raw) -> Raw:
        row = row if "completion" in row else alpaca_row(row)
        prompt, completion = _halves(row)
        require_learned([completion])
        converted = {"prompt": prompt, "completion": completion, "label": _label(row)}
        read = ("completion", "label", "kto_tag", *PROMPT_KEYS)
        return with_context(row, converted, *read)


def _halves(row: Raw) -> tuple[Any, Any]:
    if "completion" in row:
        prompt, (completion,) = prompt_and_answers(row, ("completion",))
        return prompt, completion
    if "instruction" in row:
        return alpaca_question(row), [{"role": "assistant", "content": string(row, "output")}]
    key = "conversations" if "conversations" in row else "messages"
    return split_answer([*system_of(row), *conversation(row.get(key), key)])


def _label(row: Raw) -> bool:
    key = "kto_tag" if "kto_tag" in row else "label"
    liked = label_of(row.get(key))
    if liked is None:
        problem = "is missing" if key not in row else f"is {row[key]!r}"
        raise BadRow(
            f"{key!r} {problem}, expected true or false (or 1 or 0)", "use true if the answer was liked"
        )
    return liked


_WORDS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def label_of(value: Any) -> bool | None:
    """Parse a KTO label: a boolean, 1 or 0 (also 1.0), or one of these as text; None for anything else."""
    if isinstance(value, str):
        return _WORDS.get(value.strip().lower())
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    return None
