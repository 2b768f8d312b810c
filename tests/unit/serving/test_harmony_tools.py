"""gpt-oss's tool calls: every call of a conversation is shown with its result, and what cannot be held is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gym_fed.serving.openai.catalogue import LOCAL, Catalogue
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.service import CHAT, OpenAIService
from tests.support.scripted_engine import ScriptedEngine
from tests.support.thinking_model import TOOL, template_file


@pytest.fixture
def tokenizer(nano_tokenizer: Any) -> Iterator[Any]:
    before = nano_tokenizer.chat_template
    nano_tokenizer.chat_template = template_file("gptoss").read_text(encoding="utf-8")
    yield nano_tokenizer
    nano_tokenizer.chat_template = before


def prompt(
    tokenizer: Any, messages: list[dict[str, Any]], reasoning_parser: str = "auto", **fields: Any
) -> str:
    engine = ScriptedEngine()
    service = OpenAIService(
        engine,  # type: ignore[arg-type]
        Catalogue("m"),
        tokenizer,
        vocab_size=262,
        fingerprint="",
        max_at_once=1,
        reasoning_parser=reasoning_parser,
    )
    service.handle(CHAT, {"model": "m", "messages": messages, "tools": [TOOL], **fields}, LOCAL)
    return str(tokenizer.decode(engine.requests[0].prompt_ids))


def call(number: int, city: str) -> dict[str, Any]:
    function = {"name": "rain", "arguments": f'{{"in": "{city}"}}'}
    return {"id": f"call_{number}", "type": "function", "function": function}


def test_every_call_of_a_message_is_shown_with_its_result(tokenizer: Any) -> None:
    shown = prompt(
        tokenizer,
        [
            {"role": "user", "content": "Where does it rain?"},
            {
                "role": "assistant",
                "content": "I will look.",
                "reasoning_content": "Two cities.",
                "tool_calls": [call(1, "Rome"), call(2, "Oslo")],
            },
            {"role": "tool", "tool_call_id": "call_2", "content": "wet"},
            {"role": "tool", "tool_call_id": "call_1", "content": "dry"},
        ],
    )
    places = [shown.index(text) for text in ("Two cities.", "I will look.", "Rome", "dry", "Oslo", "wet")]
    assert places == sorted(places)
    assert shown.count("to=functions.rain") == 2


def test_a_result_belongs_to_the_last_message_with_its_call(tokenizer: Any) -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "Where does it rain?"}]
    for city, result in (("Rome", "dry"), ("Oslo", "wet")):
        turns.append({"role": "assistant", "content": None, "tool_calls": [call(0, city)]})
        turns.append({"role": "tool", "tool_call_id": "call_0", "content": result})
    shown = prompt(tokenizer, turns)
    places = [shown.index(text) for text in ("Rome", "dry", "Oslo", "wet")]
    assert places == sorted(places)
    with pytest.raises(RequestError, match="'call_0' matches no earlier call without a result") as caught:
        prompt(tokenizer, [*turns, turns[-1]])
    assert caught.value.param == "messages[5].tool_call_id"


def test_tools_are_refused_without_the_parser_that_finds_their_calls(tokenizer: Any) -> None:
    with pytest.raises(
        RequestError, match="reasoning parser openai_gptoss, but the server uses none"
    ) as caught:
        prompt(tokenizer, [{"role": "user", "content": "x"}], reasoning_parser="none")
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}],
)  # type: ignore[dict-item]
def test_calls_that_must_follow_their_parameters_are_refused(tokenizer: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="cannot be constrained") as caught:
        prompt(tokenizer, [{"role": "user", "content": "x"}], **fields)
    assert caught.value.param == "tools"
