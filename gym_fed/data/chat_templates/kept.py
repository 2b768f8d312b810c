"""Finds what a chat template omits from a conversation: some drop tools or reasoning without an error."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError

from gym_fed.data.chat_templates.rendering import Message, Template

_THOUGHT = re.compile(r"\s*<think>(.*?)</think>", re.DOTALL)
_OTHER = "something-else-7c1f"


def left_out(
    template: Template, messages: list[Message], tools: Any, text: str, *, first: int = 0
) -> str | None:
    """What ``text``, the template's rendering, lacks: ``has tools``, ``calls tools``, ...; None when it has all.

    Messages before ``first`` are not looked at.
    """
    if tools and text == template.text(messages):
        return "has tools"
    for number, message in enumerate(messages[first:], first):
        for what, changed in _parts(message, text):
            if _text(template, [*messages[:number], changed, *messages[number + 1 :]], tools) == text:
                return what
        thought = _THOUGHT.match(message["content"]) if isinstance(message.get("content"), str) else None
        if message["role"] == "assistant" and thought and thought.group(1).strip() not in text:
            return "has reasoning"
    return None


def _text(template: Template, messages: list[Message], tools: Any) -> str | None:
    """None for what the template refuses: it has read what was changed."""
    try:
        return template.text(messages, tools)
    except (TemplateError, TypeError):
        return None


def _parts(message: Message, text: str) -> Iterator[tuple[str, Message]]:
    """Each part of a message that may be lacking, and the message with another in its place."""
    if message["role"] == "assistant" and message.get("reasoning_content"):
        yield "has reasoning", {**message, "reasoning_content": _OTHER}
    calls = message.get("tool_calls") or ()
    for number in range(len(calls)):
        fewer = [*calls[:number], *calls[number + 1 :]]
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        yield "calls tools", {**rest, "tool_calls": fewer} if fewer else rest
    content = message.get("content")
    if isinstance(content, str) and content.strip() and content.strip() not in text:
        yield f"has a message of the {message['role']} role", {**message, "content": _OTHER}
