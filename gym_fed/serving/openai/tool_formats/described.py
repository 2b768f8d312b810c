"""Tools for chat templates without tool support: a system message describes them, and calls use Hermes' format."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gym_fed.serving.openai.tool_formats.base import Row
from gym_fed.serving.openai.tool_formats.hermes import CLOSE, OPEN, Hermes

_TEXT = """You can call the functions below. Each line has one, with the JSON schema of its parameters:
{tools}
To call one, write a line {open}, one JSON object with its name and arguments, and a line {close}:
{open}
{{"name": "the function's name", "arguments": {{"a parameter": "its value"}}}}
{close}
Write nothing after the calls. You get their results between <tool_response> and </tool_response>."""


class Described(Hermes):
    """A format for any template; a model that was not trained for tools may call them poorly."""

    order = 1000
    describes = True

    def learn(self, written: str) -> bool:
        return False

    def hinted(self, shown: str) -> bool:
        return False

    def prepare(self, rows: Sequence[Row], tools: Sequence[Row], *, system: bool) -> list[Row]:
        """Write calls as assistant text, and results as user text, since the template supports neither."""
        prepared: list[Row] = []
        for row in rows:
            if row["role"] == "tool":
                text = f"<tool_response>\n{row['content']}\n</tool_response>"
                if prepared and prepared[-1].get("results"):
                    prepared[-1]["content"] += f"\n{text}"
                else:
                    prepared.append({"role": "user", "content": text, "results": True})
            elif row.get("tool_calls"):
                calls = [
                    f"{OPEN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{CLOSE}"
                    for call in row["tool_calls"]
                ]
                texts = [row["content"]] if row["content"] else []
                rest = {key: value for key, value in row.items() if key != "tool_calls"}
                prepared.append({**rest, "content": "\n".join([*texts, *calls])})
            else:
                prepared.append(dict(row))
        for row in prepared:
            row.pop("results", None)
        return _with_instructions(prepared, tools, system) if tools else prepared


def _with_instructions(rows: list[Row], tools: Sequence[Row], system: bool) -> list[Row]:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _TEXT.format(tools=lines, open=OPEN, close=CLOSE)
    first = rows[0]
    if first["role"] == "system" or (not system and first["role"] == "user"):
        return [
            {
                **first,
                "content": f"{first['content']}\n\n{text}" if system else f"{text}\n\n{first['content']}",
            },
            *rows[1:],
        ]
    if not system:
        return [{"role": "user", "content": text}, *rows]
    return [{"role": "system", "content": text}, *rows]
