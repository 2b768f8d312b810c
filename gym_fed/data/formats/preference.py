"""Preference pairs: a prompt, the chosen and the rejected answer, in the layouts of TRL, LLaMA-Factory, ms-swift and
OpenAI."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats._turns import (
    PROMPT_KEYS,
    alpaca_row,
    conversation,
    prompt_and_answers,
    require_learned,
)
from gym_fed.data.formats.base import BadRow, Format, Raw, note_unread, string, system_of, with_context

_PAIR = ("chosen", "rejected")
_REJECTED = ("rejected_response", "rejected_messages")
"""ms-swift's keys of the rejected answer, in a row whose conversation ends with the chosen one."""
_QUESTIONS = ("question", "query", "input")
"""Names of the prompt in preference datasets, used if the row has none of ``PROMPT_KEYS``."""
_READ = (*_PAIR, *PROMPT_KEYS, "chosen_messages", "chosen_response", *_REJECTED, "rejected_images")


class Preference(Format):
    """``{"prompt", "chosen", "rejected"}``."""

    order = 10
    kind = "preference"

    @classmethod
    def matches(cls, row: Raw) -> bool:
        return (
            row.keys() >= set(_PAIR)
            or bool({"chosen_messages", "preferred_output"} & row.keys())
            or any(row.get(key) is not None for key in _REJECTED)
        )

    def read(self, row: Raw) -> Raw:
        row = _common_names(row)
        if "chosen" in row:
            prompt, (chosen, rejected) = prompt_and_answers(row, _PAIR)
        else:
            prompt, chosen, rejected = _answered_twice(row)
        require_learned([chosen, rejected])
        if chosen == rejected:
            raise BadRow("'chosen' and 'rejected' are the same", "drop the row: it expresses no preference")
        if row.get("rejected_images", row.get("images")) != row.get("images"):
            raise BadRow(
                "'rejected_images' differ from 'images'", "both answers need the same images; drop the row"
            )
        converted = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        return with_context(row, converted, *_READ)


def _common_names(row: Raw) -> Raw:
    """Rename the keys of OpenAI, LLaMA-Factory and ms-swift to TRL's."""
    if "preferred_output" in row and isinstance(row.get("input"), dict):
        note_unread(f"input's {key}" for key in row["input"] if key not in _OF_INPUT)
        prompt = {key: row["input"][key] for key in _OF_INPUT if key in row["input"]}
        rest = {key: value for key, value in row.items() if key not in _OF_PREFERENCE}
        return {
            **rest,
            **prompt,
            "chosen": row["preferred_output"],
            "rejected": row.get("non_preferred_output"),
        }
    for name in ("messages", "response"):
        if f"chosen_{name}" in row:
            return {**row, "chosen": row[f"chosen_{name}"], "rejected": row.get(f"rejected_{name}")}
    if "chosen" not in row:
        return alpaca_row(row)
    question = next((key for key in _QUESTIONS if isinstance(row.get(key), str)), None)
    if question is None or any(key in row for key in PROMPT_KEYS if key != "input"):
        return row
    return {("prompt" if key == question else key): value for key, value in row.items()}


_OF_INPUT = ("messages", "tools", "parallel_tool_calls")
_OF_PREFERENCE = ("input", "preferred_output", "non_preferred_output")
"""Keys of OpenAI's preference rows."""


def _answered_twice(row: Raw) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the prompt of a conversation up to its last question, its answer, and the rejected one (ms-swift)."""
    if "instruction" in row:
        question, (answer,) = prompt_and_answers(row, ("output",))
        turns = [*question, *answer]
    else:
        key = "conversations" if "conversations" in row else "messages"
        turns = [*system_of(row), *conversation(row.get(key), key)]
    start = 1 + max((at for at, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    prompt, chosen = turns[:start], turns[start:]
    if not chosen:
        raise BadRow("the conversation ends with a question", "end it with the preferred answer")
    if (given := row.get("rejected_response")) is None:
        if row.get("rejected_messages") is None:
            raise BadRow(
                "has no rejected answer: 'rejected_response' and 'rejected_messages' are missing or null",
                "add one of them, or drop the row",
            )
        rejected = conversation(row["rejected_messages"], "rejected_messages")
        if rejected[:start] != prompt:
            rejected = [*system_of(row), *rejected]
        if rejected[:start] != prompt:
            raise BadRow(
                "'rejected_messages' have a different prompt", "use the same prompt in both conversations"
            )
        return prompt, chosen, rejected[start:]
    if isinstance(given, list):
        return prompt, chosen, conversation(given, "rejected_response")
    return prompt, chosen, [{"role": "assistant", "content": string(row, "rejected_response")}]
