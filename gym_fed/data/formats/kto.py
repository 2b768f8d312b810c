"""Unpaired judgements for KTO: an answer with label (or LLaMA-Factory's kto_tag), true when it was liked."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats import alpaca
from gym_fed.data.formats.answers import PROMPT_KEYS, prompt_and_answers, require_learned
from gym_fed.data.formats.base import BadRow, Raw, as_object, string, system_of, with_context
from gym_fed.data.formats.labels import label_of
from gym_fed.data.formats.turns import conversation, split_answer


def read(raw: Any) -> Raw:
    """``{"prompt", "completion", "label"}``."""
    row = as_object(raw)
    images: list[Any] = []
    prompt, completion = _halves(row, images)
    require_learned([completion])
    found = {"prompt": prompt, "completion": completion, "label": _label(row)}
    read = ("completion", "label", "kto_tag", *PROMPT_KEYS)
    return with_context(row, {**found, **({"images": images} if images else {})}, *read)


def _halves(row: Raw, images: list[Any]) -> tuple[Any, Any]:
    if "completion" in row:
        prompt, (completion,) = prompt_and_answers(row, ("completion",), images)
        return prompt, completion
    if "instruction" in row:
        return alpaca.question(row), [{"role": "assistant", "content": string(row, "output")}]
    key = "conversations" if "conversations" in row else "messages"
    return split_answer([*system_of(row), *conversation(row.get(key), key, images)])


def _label(row: Raw) -> bool:
    key = "kto_tag" if "kto_tag" in row else "label"
    liked = label_of(row.get(key))
    if liked is None:
        found = "is missing" if key not in row else f"is {row[key]!r}"
        raise BadRow(f"{key!r} {found}, expected true or false (or 1 or 0)", "true when the answer was liked")
    return liked
