"""Preference pairs: a prompt, the chosen and the rejected answer, as TRL, LLaMA-Factory and OpenAI write them."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats.answers import PROMPT_KEYS, prompt_and_answers, require_learned
from gym_fed.data.formats.base import BadRow, Raw, as_object, with_context

_PAIR = ("chosen", "rejected")
_READ = (*_PAIR, *PROMPT_KEYS, "chosen_messages", "rejected_messages")


def read(raw: Any) -> Raw:
    """``{"prompt", "chosen", "rejected"}``."""
    row = _common_names(as_object(raw))
    images: list[Any] = []
    prompt, (chosen, rejected) = prompt_and_answers(row, _PAIR, images)
    require_learned([chosen, rejected])
    if chosen == rejected:
        raise BadRow("'chosen' and 'rejected' are the same", "drop the row: it prefers nothing")
    found = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    return with_context(row, {**found, **({"images": images} if images else {})}, *_READ)


def _common_names(row: Raw) -> Raw:
    """OpenAI's and LLaMA-Factory's newer names as TRL's."""
    if "chosen_messages" in row:
        return {**row, "chosen": row["chosen_messages"], "rejected": row.get("rejected_messages")}
    if "preferred_output" in row and isinstance(row.get("input"), dict):
        asked = {key: row["input"][key] for key in ("messages", "tools") if key in row["input"]}
        return {**asked, "chosen": row["preferred_output"], "rejected": row.get("non_preferred_output")}
    return row
