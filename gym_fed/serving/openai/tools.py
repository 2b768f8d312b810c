"""Tool calls in an answer: found while it streams, or written under a schema where a call is required."""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from gym_fed.serving.openai.prompts import CALL_CLOSE, CALL_OPEN
from gym_fed.serving.openai.schemas import ChatRequest, NamedTool, Tool


@dataclass(frozen=True)
class Call:
    """One call that the model requests."""

    name: str
    arguments: str
    """JSON text of an object."""

    id: str

    def to_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class FreeCalls:
    """Splits an answer into text and ``<tool_call>{...}</tool_call>``; what is not a call stays text.

    A call is passed on when it is complete, and text that may be the beginning of a tag is held back. Arguments are the
    model's own: no schema constrains them.

    Args:
        names: Of the tools that there are; a call of another one is no call.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._inside = False

    def feed(self, text: str) -> tuple[str, list[Call]]:
        """Take the answer's next text; returns the text that is certain by now, and complete calls."""
        self._held += text
        shown, calls = "", []
        while True:
            before, tag, after = self._held.partition(CALL_CLOSE if self._inside else CALL_OPEN)
            if not tag:
                break
            if self._inside:
                call = self._parse(before)
                if call is None:
                    shown += CALL_OPEN + before + CALL_CLOSE
                else:
                    calls.append(call)
            else:
                shown += before
            self._held, self._inside = after, not self._inside
        if not self._inside:
            kept = _start_of(CALL_OPEN, self._held)
            shown += self._held[: len(self._held) - kept]
            self._held = self._held[len(self._held) - kept :]
        return shown, calls

    def end(self) -> tuple[str, list[Call]]:
        """The held-back text: a last call that was ended by a stop text, or else text."""
        held, self._held = self._held, ""
        if self._inside:
            call = self._parse(held)
            return ("", [call]) if call is not None else (CALL_OPEN + held, [])
        return held, []

    def _parse(self, text: str) -> Call | None:
        call = _parse(text)
        return call if call is not None and call.name in self._names else None


class RequiredCall:
    """An answer that is one call and nothing else, held to ``schema_of_calls``."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> tuple[str, list[Call]]:
        self._text += text
        return "", []

    def end(self) -> tuple[str, list[Call]]:
        """The call; an answer that was cut short is given as text."""
        call = _parse(self._text)
        return ("", [call]) if call is not None else (self._text, [])


def schema_of_calls(request: ChatRequest) -> dict[str, Any] | None:
    """Schema of an answer that must be a call, by ``tool_choice``; None where it need not be one."""
    tools = request.tools or []
    if isinstance(request.tool_choice, NamedTool):
        name = request.tool_choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
    elif request.tool_choice != "required":
        return None
    choices = [_schema_of_call(tool) for tool in tools]
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def shown_tools(request: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools as a template gets them; none where ``tool_choice`` is ``none``."""
    if not request.tools or request.tool_choice == "none":
        return None
    return [tool.model_dump(exclude_none=True) for tool in request.tools]


def _schema_of_call(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": tool.function.name},
            "arguments": tool.function.parameters or {"type": "object"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parse(text: str) -> Call | None:
    try:
        found = json.loads(text)
        name, arguments = found["name"], found.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False), f"call_{secrets.token_hex(12)}")


def _start_of(tag: str, text: str) -> int:
    """How many of the last characters of ``text`` may be the beginning of ``tag``."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)
