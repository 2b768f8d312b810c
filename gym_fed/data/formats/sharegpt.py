"""ShareGPT: conversations of turns with from and value; function_call and observation are tool calls and results."""

from __future__ import annotations

import json

from gym_fed.data.formats._turns import conversation_row
from gym_fed.data.formats.base import Format, Raw, conversation_of

_SPEAKERS = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
_ALSO_IN_TURNS = ("weight", "masked", "reasoning_content", "name", "tool_call_id")


class ShareGpt(Format):
    """The conversation under ``conversations``, or ms-swift's ``conversation`` of pairs."""

    order = 40

    @classmethod
    def matches(cls, row: Raw) -> bool:
        return "conversations" in row or isinstance(row.get("conversation"), list)

    def read(self, row: Raw) -> Raw:
        return conversation_row(row, "conversation" if "conversation" in row else "conversations")

    def write(self, row: Raw) -> Raw:
        messages, rest = conversation_of(row, "sharegpt")
        turns = []
        for message in messages:
            if "tool_calls" in message:
                functions = [call["function"] for call in message["tool_calls"]]
                value = json.dumps(functions[0] if len(functions) == 1 else functions, ensure_ascii=False)
                turn = {"from": "function_call", "value": value}
            else:
                turn = {"from": _SPEAKERS[message["role"]], "value": message["content"]}
            turns.append({**turn, **{key: message[key] for key in _ALSO_IN_TURNS if key in message}})
        return {"conversations": turns, **rest}
