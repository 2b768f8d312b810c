"""Answers constrained to patterns, choices, grammars and strict tools, by a random model through the API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from gym_fed.core.errors import ErrorCode
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.refusals import RequestError, error_body
from gym_fed.serving.openai.service import CHAT, COMPLETIONS, OpenAIService
from tests.support.tool_templates import HERMES
from tests.support.toy_engine import ToyModel
from tests.support.wishing import Wishing, served, tokenizer_with

USER = [{"role": "user", "content": "hi"}]
GRAMMAR = 'start: "a" digits\ndigits: /[0-9]{3}/'
GBNF = 'root ::= "a" digit digit digit\ndigit ::= [0-9]'
WITH_OPTIONS = '// of Lark\n?start: "a" digits\ndigits: /[0-9]{3}/'
GBNF_START = 'root ::= "a" start\nstart ::= [0-9] [0-9] [0-9] # "start: x"'

BOOKING = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Basel"]},
        "nights": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "nights"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "book", "parameters": BOOKING, "strict": True}},
    {"type": "function", "function": {"name": "look", "parameters": BOOKING}},
]


@pytest.fixture(scope="module")
def service() -> Iterator[OpenAIService]:
    """Of a model whose next token is random: what it writes is what it is held to."""
    with served(ToyModel(4096), tokenizer_with(HERMES)) as found:
        yield found


@pytest.fixture(scope="module")
def wishing() -> Wishing:
    return Wishing()


@pytest.fixture(scope="module")
def willing(wishing: Wishing) -> Iterator[OpenAIService]:
    with served(wishing, tokenizer_with(HERMES)) as found:
        yield found


def written(service: OpenAIService, url: str, seed: int, **fields: Any) -> str:
    given = {"messages": USER} if url == CHAT else {"prompt": "x"}
    (choice,) = service.handle(
        url, {"model": "toy", **given, "seed": seed, "max_tokens": 200, **fields}, LOCAL
    )["choices"]
    assert choice["finish_reason"] == "stop"
    return str(choice["message"]["content"] if url == CHAT else choice["text"])


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("older", "newer", "value", "pattern"),
    [
        ("guided_regex", "regex", r"[a-c]{2}-\d{3}", r"[a-c]{2}-\d{3}"),
        ("guided_choice", "choice", ["yes", "no", 'per"haps\n'], r'yes|no|per"haps\n'),
        ("guided_grammar", "grammar", GRAMMAR, r"a\d{3}"),
        ("guided_grammar", "grammar", GBNF, r"a\d{3}"),
        ("guided_grammar", "grammar", WITH_OPTIONS, r"a\d{3}"),
        ("guided_grammar", "grammar", GBNF_START, r"a\d{3}"),
        ("guided_json", "json", {"enum": [1, "b"]}, r'1|"b"'),
        ("guided_json", "json", '{"enum": [1, "b"]}', r'1|"b"'),
    ],
)
def test_answers_are_held_in_both_forms_of_vllm(
    service: OpenAIService, url: str, older: str, newer: str, value: Any, pattern: str
) -> None:
    found = [written(service, url, seed, **{older: value}) for seed in range(4)]
    assert found == [written(service, url, seed, structured_outputs={newer: value}) for seed in range(4)]
    assert all(re.fullmatch(pattern, text) for text in found)


def test_a_pattern_may_be_ended_by_a_stop_text(service: OpenAIService) -> None:
    text = written(service, CHAT, 1, guided_regex=r"[ab]{3,9}\n+c", stop=["\n"])
    assert re.fullmatch(r"[ab]{3,9}", text)


@pytest.mark.parametrize(
    ("fields", "param", "code", "said"),
    [
        ({"guided_regex": "a(?=b)"}, "guided_regex", "invalid_value", "look-around"),
        ({"guided_regex": "("}, "guided_regex", "invalid_value", "cannot be enforced"),
        ({"guided_regex": "a" * 5000}, "guided_regex", "invalid_value", "4096"),
        (
            {"structured_outputs": {"regex": "["}},
            "structured_outputs.regex",
            "invalid_value",
            "cannot be enforced",
        ),
        ({"guided_choice": []}, "guided_choice", "invalid_value", "at least 1"),
        ({"guided_choice": ["a" * 300_000]}, "guided_choice", "invalid_value", "200,000"),
        ({"guided_grammar": "start: nothing"}, "guided_grammar", "invalid_value", "cannot be enforced"),
        ({"guided_grammar": "x" * 30_000}, "guided_grammar", "invalid_value", "20000"),
        ({"guided_json": {"type": "nothing"}}, "guided_json", "invalid_json_schema", "nothing"),
        ({"guided_json": "{"}, "guided_json", "invalid_json_schema", "not JSON"),
        ({"guided_json": {}, "stop": "a"}, "stop", "invalid_value", "truncated"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "invalid_value", "can follow one grammar"),
        ({"structured_outputs": {}}, "structured_outputs", "invalid_value", "set one of json"),
        (
            {"structured_outputs": {"structural_tag": "{}"}},
            "structured_outputs.structural_tag",
            "unsupported_parameter",
            "not supported",
        ),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "unsupported_parameter", "not"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "guided_regex",
            "invalid_value",
            "can follow one grammar",
        ),
        ({"guided_regex": "a", "tools": TOOLS}, "guided_regex", "invalid_value", "tools"),
        ({"tools": TOOLS, "stop": "a"}, "stop", "invalid_value", "truncated"),
    ],
)
def test_what_cannot_hold_an_answer_is_refused_by_its_field(
    service: OpenAIService, fields: dict[str, Any], param: str, code: str, said: str
) -> None:
    with pytest.raises(RequestError) as caught:
        service.handle(CHAT, {"model": "toy", "messages": USER, **fields}, LOCAL)
    assert caught.value.code is ErrorCode.USAGE
    reported = error_body(caught.value)["error"]
    assert (reported["param"], reported["code"]) == (param, code)
    assert said in reported["message"]


def chat(service: OpenAIService, **fields: Any) -> dict[str, Any]:
    body = {"model": "toy", "messages": USER, "tools": TOOLS, "max_tokens": 400, **fields}
    (choice,) = service.handle(CHAT, body, LOCAL)["choices"]
    return dict(choice)


def test_a_model_writes_freely_until_it_begins_a_call(willing: OpenAIService, wishing: Wishing) -> None:
    wishing.wish = list(b'Just <b>text</b> with {"name": 1} and <tool')
    choice = chat(willing)
    assert choice["message"]["content"] == bytes(wishing.wish).decode()
    assert choice["finish_reason"] == "stop"


def test_a_strict_call_is_held_to_its_schema_from_its_beginning_on(
    willing: OpenAIService, wishing: Wishing
) -> None:
    wishing.wish = list(
        b'So. <tool_call>\n{"name": "book", "arguments": {"city": "Paris", "nights": 77}}\n</tool_call>'
    )
    choice = chat(willing, parallel_tool_calls=False)  # what is left of the wish is no second call
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "So."
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "book"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Bern", "Basel")
    assert 1 <= arguments["nights"] <= 9


def test_beside_a_strict_tool_another_takes_any_object(willing: OpenAIService, wishing: Wishing) -> None:
    wishing.wish = list(b'<tool_call>\n{"name": "look", "arguments": {"city": "Paris"}}\n</tool_call>')
    (call,) = chat(willing)["message"]["tool_calls"]
    assert call["function"] == {"name": "look", "arguments": '{"city": "Paris"}'}


def test_no_parallel_calls_are_one_call(willing: OpenAIService, wishing: Wishing) -> None:
    one = '<tool_call>\n{"name": "book", "arguments": {"city": "Bern", "nights": 7}}\n</tool_call>'
    wishing.wish = list((f"{one}\n{one}").encode())
    assert len(chat(willing)["message"]["tool_calls"]) == 2
    assert len(chat(willing, parallel_tool_calls=False)["message"]["tool_calls"]) == 1
    free = [{"type": "function", "function": {**tool["function"], "strict": False}} for tool in TOOLS]
    assert len(chat(willing, tools=free, parallel_tool_calls=False)["message"]["tool_calls"]) == 1


def test_a_strict_call_streams_its_name_and_then_its_arguments(
    willing: OpenAIService, wishing: Wishing
) -> None:
    one = '<tool_call>\n{"name": "book", "arguments": {"city": "Bern", "nights": 7}}\n</tool_call>'
    wishing.wish = list((f"So. {one}\n{one}").encode())
    body = {"model": "toy", "messages": USER, "tools": TOOLS, "max_tokens": 400, "stream": True}
    chunks = [chunk["choices"][0] for chunk in willing.stream(CHAT, body, LOCAL)]
    deltas = [call for chunk in chunks for call in chunk["delta"].get("tool_calls", [])]
    assert chunks[-1]["finish_reason"] == "tool_calls"
    for index in (0, 1):
        first, *more = [delta for delta in deltas if delta["index"] == index]
        assert first["function"] == {"name": "book", "arguments": ""}
        assert first["id"].startswith("call_")
        assert first["type"] == "function"
        assert len(more) > 10
        assert all(set(delta) == {"index", "function"} for delta in more)
        arguments = "".join(delta["function"]["arguments"] for delta in more)
        assert json.loads(arguments) == {"city": "Bern", "nights": 7}


def test_a_required_call_is_one_call_and_nothing_else(service: OpenAIService) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        found = chat(service, tool_choice=choice, seed=3)
        (call,) = found["message"]["tool_calls"]
        assert found["message"]["content"] is None
        assert json.loads(call["function"]["arguments"])["city"] in ("Bern", "Basel")
        assert choice == "required" or call["function"]["name"] == "look"
