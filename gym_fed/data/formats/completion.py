"""TRL's prompt and completion. Only the completion is learned; conversations become messages, texts stay texts."""

from __future__ import annotations

from gym_fed.data.formats._turns import PROMPT_KEYS, prompt_and_answers
from gym_fed.data.formats.base import Format, Raw, context_of, with_context
from gym_fed.data.rows import not_learned


class Completion(Format):
    """Rows ``{"messages": [...]}`` with both, or ``{"prompt": str, "completion": str}``."""

    order = 60

    @classmethod
    def matches(cls, row: Raw) -> bool:
        return "prompt" in row and "completion" in row

    def read(self, row: Raw) -> Raw:
        prompt, (answer,) = prompt_and_answers(row, ("completion",))
        both = (
            {"prompt": prompt, "completion": answer}
            if isinstance(prompt, str)
            else {"messages": [*not_learned(prompt), *answer]}
        )
        return with_context(row, both, "completion", *PROMPT_KEYS)

    def write(self, row: Raw) -> Raw:
        if "messages" not in row:
            return row
        messages = row["messages"]
        learned = (at for at, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight") != 0)
        start = next(learned, len(messages) - 1)
        return {"prompt": messages[:start], "completion": messages[start:], **context_of(row)}
