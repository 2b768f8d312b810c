"""Preference pairs: a prompt, the chosen and the rejected answer, in the layouts of TRL, LLaMA-Factory and OpenAI."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats._turns import PROMPT_KEYS, prompt_and_answers, require_learned
from gym_fed.data.formats.base import BadRow, Format, Raw, with_context

_PAIR = ("chosen", "rejected")
_READ = (*_PAIR, *PROMPT_KEYS, "chosen_messages", "rejected_messages")


class Preference(Format):
    """``{"prompt", "chosen", "rejected"}``."""

    order = 10
    kind = "preference"

    @classmethod
    def matches(cls, row: Raw) -> bool:
        return row.keys() >= set(_PAIR) or "chosen_messages" in row or "preferred_output" in row

    def read(self, row: Raw) -> Raw:
        row = _common_names(row)
        images: list[Any] = []
        prompt, (chosen, rejected) = prompt_and_answers(row, _PAIR, images)
        require_learned([chosen, rejected])
        if chosen == rejected:
            raise BadRow("'chosen' and 'rejected' are the same", "drop the row: it prefers nothing")
        converted = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        return with_context(row, converted, *_READ, images=images)


def _common_names(row: Raw) -> Raw:
    """Rename OpenAI's and LLaMA-Factory's newer keys to TRL's."""
    if "chosen_messages" in row:
        return {**row, "chosen": row["chosen_messages"], "rejected": row.get("rejected_messages")}
    if "preferred_output" in row and isinstance(row.get("input"), dict):
        prompt = {key: row["input"][key] for key in ("messages", "tools") if key in row["input"]}
        return {**prompt, "chosen": row["preferred_output"], "rejected": row.get("non_preferred_output")}
    return row
