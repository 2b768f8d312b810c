"""Convert turns of Anthropic's and ms-swift's layouts to those of OpenAI's."""

from __future__ import annotations

from typing import Any

from gym_fed.data.formats._masks import WEIGHTS, text_of_part
from gym_fed.data.formats.base import BadRow, Message, Raw, as_object, note_unread

REASONING = ("reasoning_content", "thinking", "reasoning")
_BLOCKS = {
    "tool_use": ("type", "id", "name", "input"),
    "tool_result": ("type", "tool_use_id", "content"),
    "thinking": ("type", "thinking"),
}
"""Anthropic's blocks that are not content, with the keys to read."""


def turns_of(turn: Raw) -> list[Raw]:
    """Split a turn of a file: Anthropic's tool results become separate turns before the rest."""
    content = turn.get("content")
    kinds = (
        [block.get("type") if isinstance(block, dict) else None for block in content or ()]
        if isinstance(content, list)
        else []
    )
    if not isinstance(content, list) or not any(kind in _BLOCKS for kind in kinds):
        return [turn]
    flags = {key: turn[key] for key in WEIGHTS if turn.get(key) is not None}
    results: list[Raw] = []
    calls: list[Raw] = []
    thoughts: list[str] = []
    rest: list[Any] = []
    for kind, block in zip(kinds, content, strict=True):
        note_unread(f"a part's {key}" for key in block if kind in _BLOCKS and key not in _BLOCKS[kind])
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            result = {"role": "tool", "content": _result(block.get("content"))}
            results.append({**result, "tool_call_id": block.get("tool_use_id"), **flags})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        else:
            rest.append(block)
    if not rest and not calls and not thoughts:
        return results
    spoken = {**turn, "content": rest or None}
    if calls:
        spoken["tool_calls"] = calls
    if thoughts:
        if other := next(
            (key for key in REASONING if turn.get(key) not in (None, "", "\n".join(thoughts))), None
        ):
            raise BadRow(f"'thinking' blocks and {other!r} of one turn differ", "keep one of them")
        spoken["reasoning_content"] = "\n".join(thoughts)
    return [*results, spoken]


def _result(content: Any) -> str:
    """Return the text of a tool's result."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = [text_of_part(part) for part in content] if isinstance(content, list) else [None]
    if any(text is None for text in texts):
        raise BadRow(
            "a tool's result has parts that are not text", "write the result as text, or drop the row"
        )
    return "".join(text for text in texts if text)


_PAIR = (("human", "user"), ("assistant", "gpt", "bot"))


def pairs_as_turns(turns: list[Any]) -> list[Any]:
    """Split turns such as ``{"human": ..., "assistant": ...}`` into a question and an answer."""
    split: list[Any] = []
    for turn in turns:
        if not isinstance(turn, dict) or "role" in turn or "from" in turn:
            return turns
        names = [next((name for name in names if name in turn), None) for names in _PAIR]
        if None in names:
            return turns
        note_unread(f"a message's {key}" for key in turn if key not in names)
        for role, name in zip(("user", "assistant"), names, strict=True):
            split.append({"role": role, "content": turn[str(name)]})
    return split


def with_calls_joined(messages: list[tuple[Message, bool, bool]]) -> list[Message]:
    """Merge tool calls in separate turns into the assistant's turn before them.

    Args:
        messages: Each message, True if it consists only of tool calls (role ``tool_call``), and True if it has its own
            weight. Calls without a weight get that of the turn before them.
    """
    joined: list[Message] = []
    for message, only_calls, weighted in messages:
        last = joined[-1] if joined else {}
        if not only_calls or last.get("role") != "assistant":
            joined.append(as_object(message))
            continue
        if weighted and message.get("weight", 1) != last.get("weight", 1):
            raise BadRow(
                "tool calls of one turn have different weights",
                "set the weight only on the assistant's first turn",
            )
        joined[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
    return joined
