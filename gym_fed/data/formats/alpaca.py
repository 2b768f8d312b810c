"""Alpaca: instruction, input and output, with LLaMA-Factory's system and history."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats.base import BadRow, Message, Raw, as_object, string, system_of, with_context

KEYS = ("instruction", "input", "output", "history")


def read(raw: Any) -> Raw:
    """A conversation that ends with ``output``."""
    row = as_object(raw)
    messages = question(row)
    messages.append({"role": "assistant", "content": string(row, "output")})
    return with_context(row, {"messages": messages}, *KEYS)


def question(row: Raw) -> list[Message]:
    """Everything before the answer: ``system``, ``history``, then ``instruction`` and ``input`` on a line each."""
    instruction = string(row, "instruction")
    extra = string(row, "input", optional=True)
    messages = system_of(row)
    history = row.get("history") or []
    if not isinstance(history, list):
        raise BadRow("'history' is not a list", "give it as a list of [question, answer] pairs")
    for pair in history:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(p, str) for p in pair)):
            raise BadRow(
                "'history' holds something that is no pair of texts", "write [question, answer] pairs"
            )
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    messages.append({"role": "user", "content": f"{instruction}\n{extra}" if extra else instruction})
    return messages
