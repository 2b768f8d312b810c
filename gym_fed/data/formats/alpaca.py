"""Alpaca: instruction, input and output, with system and history; Dolly: context and response; ms-swift: query."""

from __future__ import annotations

from gym_fed.data.formats._turns import ALPACA_KEYS, alpaca_question, alpaca_row
from gym_fed.data.formats.base import BadRow, Format, Raw, conversation_of, string, with_context


class Alpaca(Format):
    """A conversation that ends with ``output``."""

    order = 50

    @classmethod
    def matches(cls, row: Raw) -> bool:
        return "instruction" in row or row.keys() >= {"query", "response"}

    def read(self, row: Raw) -> Raw:
        row = alpaca_row(row)
        messages = [*alpaca_question(row), {"role": "assistant", "content": string(row, "output")}]
        return with_context(row, {"messages": messages}, *ALPACA_KEYS)

    def write(self, row: Raw) -> Raw:
        messages, rest = conversation_of(row, "alpaca")
        written: Raw = {}
        if messages[0]["role"] == "system":
            written["system"] = messages[0]["content"]
            messages = messages[1:]
        roles = [message["role"] for message in messages]
        if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
            raise BadRow(
                "does not alternate user and assistant, as alpaca requires", "choose messages or sharegpt"
            )
        texts = [message["content"] for message in messages]
        history = [list(texts[at : at + 2]) for at in range(0, len(texts) - 2, 2)]
        written |= {"instruction": texts[-2], "input": "", "output": texts[-1]}
        return {**written, **({"history": history} if history else {}), **rest}
