"""What a call of a tool is held to where the tool names no parameters."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from gym_fed.serving.openai.fields import parse
from gym_fed.serving.openai.schemas import CHAT_NEUTRAL, ChatRequest
from gym_fed.serving.openai.tool_template import ToolUse

NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TEMPLATE: Any = SimpleNamespace(
    shown_ids=tuple,
    format=SimpleNamespace(close=""),
    grammar=lambda tools, *, one, required: json.dumps(tools),
)


@pytest.mark.parametrize(
    ("function", "choice", "held"),
    [
        ({}, "required", NOTHING),
        ({"strict": True}, "auto", NOTHING),
        ({"parameters": {}}, "required", {}),
        ({"parameters": {"type": "object"}}, "required", {"type": "object"}),
    ],
)
def test_a_tool_that_names_no_parameters_is_called_without_any(
    function: dict[str, Any], choice: str, held: dict[str, Any]
) -> None:
    tool = {"type": "function", "function": {"name": "now", **function}}
    message = {"role": "user", "content": "x"}
    body = {"model": "m", "messages": [message], "tools": [tool], "tool_choice": choice}
    request = parse(ChatRequest, body, CHAT_NEUTRAL)
    assert json.loads(ToolUse(request, TEMPLATE).sampling()["grammar"].text) == {"now": held}
