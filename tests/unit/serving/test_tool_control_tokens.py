"""Call marks that are control tokens are shown in answers, and forced by their ids in grammars."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from gym_fed.serving.engine.detokenizing import TextDecoder
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.service import CHAT, OpenAIService
from tests.support.tool_templates import MISTRAL_SMALL
from tests.support.wishing import Wishing, served, tokenizer_with

MARKS = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Basel"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(MISTRAL_SMALL, *MARKS)


@pytest.fixture(scope="module")
def model() -> Wishing:
    return Wishing()


@pytest.fixture(scope="module")
def service(model: Wishing, tokenizer: Any) -> Iterator[OpenAIService]:
    with served(model, tokenizer) as found:
        yield found


def chat(service: OpenAIService, *, strict: bool = False, **fields: Any) -> dict[str, Any]:
    tool = {"type": "function", "function": {"name": "look", "parameters": CITY, "strict": strict}}
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [tool],
        "max_tokens": 200,
        **fields,
    }
    (choice,) = service.handle(CHAT, body, LOCAL)["choices"]
    return dict(choice)


def test_free_calls_after_control_tokens_are_found(
    service: OpenAIService, model: Wishing, tokenizer: Any
) -> None:
    model.wish = tokenizer.encode('So.[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}')
    assert model.wish.count(tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")) == 1
    found = chat(service)
    (call,) = found["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"city": "Paris"}'}
    assert found["message"]["content"] == "So."
    assert len(call["id"]) == 9


def test_without_tools_no_control_token_is_in_the_text(
    service: OpenAIService, model: Wishing, tokenizer: Any
) -> None:
    model.wish = tokenizer.encode("So.[TOOL_CALLS]look[ARGS]x")
    assert chat(service, tools=None)["message"]["content"] == "So.lookx"


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_strict_calls_are_held_after_control_tokens(
    service: OpenAIService, model: Wishing, tokenizer: Any, choice: str
) -> None:
    wish = 'So.[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{"city": "Paris"}'
    if choice == "required":
        wish = wish.removeprefix("So.")
    model.wish = tokenizer.encode(wish)
    found = chat(service, strict=True, tool_choice=choice)
    (call,) = found["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Bern", "Basel")
    assert found["finish_reason"] == "tool_calls"


def test_a_shown_control_token_does_not_disturb_the_text_around_it(tokenizer: Any) -> None:
    decoder = TextDecoder(tokenizer)
    mark = tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")
    ids = tokenizer.encode("Zoë[TOOL_CALLS]né" * 20)
    stream = decoder.stream([], {mark})
    assert "".join(map(stream.push, ids)) == "Zoë[TOOL_CALLS]né" * 20
    hidden = decoder.stream([])
    assert "".join(map(hidden.push, ids)) == "Zoëné" * 20
    cut = decoder.stream([], {mark})
    assert "".join(map(cut.push, [*b"Zo", 0xC3, mark, *b"x"])) == "Zo�[TOOL_CALLS]x"
