"""OpenAI's messages: role and content, tool calls, and content parts with text or images."""

from __future__ import annotations

import json

from gym_fed.data.formats._turns import conversation_row
from gym_fed.data.formats.base import Format, Message, Raw, conversation_of


class Messages(Format):
    """The conversation under ``messages``."""

    order = 30

    @classmethod
    def matches(cls, row: Raw) -> bool:
        return "messages" in row

    def read(self, row: Raw) -> Raw:
        return conversation_row(row, "messages")

    def write(self, row: Raw) -> Raw:
        """Write arguments of tool calls as text, as in OpenAI's format."""
        messages, rest = conversation_of(row, "messages")
        return {"messages": [_with_text_arguments(message) for message in messages], **rest}


def _with_text_arguments(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}
