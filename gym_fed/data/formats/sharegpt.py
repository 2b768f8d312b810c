"""ShareGPT: conversations of turns with from and value; function_call and observation are tool calls and results."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats.base import Raw, as_object, system_of, with_context
from gym_fed.data.formats.turns import answered, conversation


def read(raw: Any) -> Raw:
    """The conversation under ``conversations``."""
    return conversation_row(as_object(raw), "conversations")


def conversation_row(row: Raw, key: str) -> Raw:
    """The supervised row of the turns under ``key``."""
    images: list[Any] = []
    messages = answered([*system_of(row), *conversation(row.get(key), key, images)])
    return with_context(row, {"messages": messages, **({"images": images} if images else {})}, key)
