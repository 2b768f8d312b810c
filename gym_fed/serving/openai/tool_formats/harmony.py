"""gpt-oss's format: a message to ``functions.NAME`` in the channel ``commentary``, whose text is JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gym_fed.serving.openai.tool_formats._json_calls import JsonCallReader
from gym_fed.serving.openai.tool_formats.base import (
    CallGrammar,
    CallReader,
    CannotHold,
    Row,
    ToolFormat,
    Tools,
)
from gym_fed.serving.reasoning.parsers.openai_gptoss import CALL, CALL_MARK, CHANNEL, CONSTRAIN, MESSAGE

_LEAD = r"(?P<name>[A-Za-z0-9_-]{1,64})[^{]{0,64}?<\|message\|>\s*"


class Harmony(ToolFormat):
    """The format of calls that the reasoning parser ``openai_gptoss`` outputs, wherever the recipient was."""

    order = 60
    marks = (CALL_MARK,)
    controls = (CHANNEL, MESSAGE, CONSTRAIN)
    close = CALL
    reasoning_parser = "openai_gptoss"

    def hinted(self, shown: str) -> bool:
        return "Calls to these tools must go to the commentary channel" in shown

    def reader(self, mark: str, tools: Tools, *, fragments: bool) -> CallReader:
        return JsonCallReader(mark, tools, fragments=fragments, lead=_LEAD, tail=CALL)

    def grammar(self, tools: Tools, *, one: bool, required: bool) -> CallGrammar:
        raise CannotHold("this model's calls cannot be constrained, since channels precede them")

    def prepare(self, rows: Sequence[Row], tools: Sequence[Row], *, system: bool) -> list[Row]:
        """Give every call its own message, followed by its result, since the template shows one call per message."""
        prepared: list[list[Row]] = []
        waiting: dict[str, list[list[Row]]] = {}  # messages with calls that have no result yet, by call id
        for row in rows:
            if row.get("tool_calls"):
                places = [[message] for message in _one_by_one(row)]
                ids = [call["id"] for call in row["tool_calls"]]
                # Ids may repeat, so a result belongs to the last message that has a call with its id
                waiting |= {call_id: [] for call_id in ids}
                for call_id, place in zip(ids, places, strict=True):
                    waiting[call_id].append(place)
                prepared += places
            elif row["role"] == "tool" and waiting.get(row["tool_call_id"]):
                waiting[row["tool_call_id"]].pop(0).append(row)
            else:
                prepared.append([row])
        return [row for place in prepared for row in place]


def _one_by_one(row: Row) -> Iterator[Row]:
    # A message with a call has one text, which the template renders in the analysis channel
    text = "\n".join(filter(None, (row.get("thinking"), row["content"])))
    for number, call in enumerate(row["tool_calls"]):
        yield {"role": "assistant", "content": "" if number else text, "tool_calls": [call]}
