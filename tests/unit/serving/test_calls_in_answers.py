"""Tool calls in answers: their order among text, their tokens, and calls that are cut short."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from gym_fed.config.serving import StoredAnswersConfig
from gym_fed.core.registries import TOOL_FORMATS
from gym_fed.serving.engine.request import Event, GenerationRequest, TokenLogprob
from gym_fed.serving.openai.answers import AnswerChoice
from gym_fed.serving.openai.catalogue import LOCAL, Catalogue
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.responses import RESPONSES
from gym_fed.serving.openai.responses_answer import ResponsesAnswer
from gym_fed.serving.openai.responses_request import ResponsesRequest
from gym_fed.serving.openai.service import CHAT, OpenAIService
from gym_fed.serving.openai.stored_answers import StoredAnswers
from gym_fed.serving.openai.tool_formats.base import CallParser
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tool_templates import source_of

OBJECT = '{"name": "weather", "arguments": {"city": "Bern"}}'
CALL = f"<tool_call>\n{OBJECT}\n</tool_call>"
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", **FUNCTION}
STRICT = {**TOOL, "strict": True}
CUT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Be'


@pytest.fixture
def tokenizer(nano_tokenizer: Any) -> Iterator[Any]:
    before, nano_tokenizer.chat_template = nano_tokenizer.chat_template, source_of("hermes")
    yield nano_tokenizer
    nano_tokenizer.chat_template = before


def service(tokenizer: Any, engine: ScriptedEngine) -> OpenAIService:
    return OpenAIService(
        engine,  # type: ignore[arg-type]
        Catalogue("nano"),
        tokenizer,
        vocab_size=262,
        fingerprint="fp_1",
        max_at_once=20,
        stored=StoredAnswers(StoredAnswersConfig()),
    )


def answer_of(served: OpenAIService, **fields: Any) -> dict[str, Any]:
    return served.begin(RESPONSES, {"model": "nano", "input": "hi", **fields}, LOCAL).run()


def response_of(texts: list[str], *, held: bool) -> list[dict[str, Any]]:
    """The items of a response whose model writes each text in one step, as one token."""
    parser = CallParser(TOOL_FORMATS.new("hermes"), {"weather": None}, fragments=held)
    request = ResponsesRequest(model="nano", input="hi")
    more = {"with_logprobs": True, "include_usage": False, "fingerprint": "fp_1"}
    answer = ResponsesAnswer("nano", 1, [AnswerChoice(parser)], request=request, keep_response=None, **more)
    written = 0
    for text in texts:
        token = TokenLogprob(1, text.encode(), -0.5, (), written, written + len(text))
        answer.take(0, Event(text, (1,), (token,)))
        written += len(text)
    answer.take(0, Event("", (2,), (), "stop"))
    answer.closing()
    items: list[dict[str, Any]] = answer.body()["output"]
    return items


def _text(text: str, request: GenerationRequest) -> str:
    return text


def shown(items: list[dict[str, Any]]) -> list[Any]:
    return [
        (item["type"], item["arguments"] if "arguments" in item else item["content"][0]["text"])
        for item in items
    ]


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize(
    "texts",
    [
        ["<tool_call>\n", OBJECT[:-2], "}}\n</tool_call>\nDone"],
        [f"{CALL}\nDone"],
        ["<tool_call>", f"\n{OBJECT}\n</tool_call>", "\nDone"],
    ],
)
def test_text_that_comes_with_the_end_of_a_call_is_an_item_after_it(texts: list[str], held: bool) -> None:
    items = shown(response_of(texts, held=held))
    assert items == [("function_call", '{"city": "Bern"}'), ("message", "\nDone")]


@pytest.mark.parametrize("held", [True, False])
def test_the_log_probabilities_of_a_call_are_not_those_of_text(held: bool) -> None:
    texts = ["Look: ", *CALL, "Done", "."]
    items = response_of(texts, held=held)
    found = [[one["token"] for one in item["content"][0]["logprobs"]] for item in items if "content" in item]
    assert [item["type"] for item in items] == ["message", "function_call", "message"]
    assert found == [["Look: "], ["Done", "."]]


def test_a_response_whose_call_was_cut_short_can_be_continued(tokenizer: Any) -> None:
    engine = ScriptedEngine(lambda request: CUT, finish="length")
    served = service(tokenizer, engine)
    first = answer_of(served, tools=[STRICT])
    (item,) = first["output"]
    assert (item["type"], item["status"], item["arguments"]) == (
        "function_call",
        "incomplete",
        '{"city": "Be',
    )
    engine.script, engine.finish = (lambda request: "Well."), "stop"
    second = answer_of(served, input="go on", previous_response_id=first["id"], tools=[STRICT])
    assert second["output"][0]["content"][0]["text"] == "Well."
    said = served._prompts.text(engine.requests[1].prompt_ids, special=True)
    assert "Bern" not in said
    assert said.index("hi") < said.index("go on")


def test_a_whole_call_before_the_cut_stays_in_the_conversation(tokenizer: Any) -> None:
    for text, tool in ((CALL.removesuffix("</tool_call>"), STRICT), (CALL, TOOL)):
        engine = ScriptedEngine(partial(_text, text), finish="length")
        served = service(tokenizer, engine)
        first = answer_of(served, tools=[tool])
        (item,) = first["output"]
        assert (first["status"], item["status"]) == ("incomplete", "completed")
        result = {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
        assert answer_of(served, input=[result], previous_response_id=first["id"], tools=[tool])["output"]


@pytest.mark.parametrize(("arguments", "said"), [('{"city": "Be', "not JSON"), ("[1]", "not a JSON object")])
def test_arguments_that_are_no_object_are_refused_at_their_place(
    tokenizer: Any, arguments: str, said: str
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    served = service(tokenizer, ScriptedEngine())
    with pytest.raises(RequestError, match=said) as caught:
        served.begin(CHAT, {"model": "nano", "messages": messages}, LOCAL)
    assert caught.value.param == "messages[1].tool_calls[0].function.arguments"
    item = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": arguments}
    with pytest.raises(RequestError, match=said) as caught:
        answer_of(served, input=[{"role": "user", "content": "hi"}, item])
    assert caught.value.param == "input[1]"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("mistral", f"[TOOL_CALLS] [{OBJECT}, {OBJECT}]"),
        ("mistral_v11", '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}[TOOL_CALLS]weather[ARGS]{"city": "Bern"}'),
        ("llama3_2", f"{OBJECT}; {OBJECT}".replace("arguments", "parameters")),
        ("pythonic", '[weather(city="Bern")] and so on'),
    ],
)
def test_an_answer_that_may_have_one_call_ends_with_it(tokenizer: Any, template: str, text: str) -> None:
    tokenizer.chat_template = source_of(template)
    engine = ScriptedEngine(lambda request: text + " and much more" * 10)
    body = {"model": "nano", "messages": [{"role": "user", "content": "hi"}], "parallel_tool_calls": False}
    tools = [{"type": "function", "function": FUNCTION}]
    found = service(tokenizer, engine).begin(CHAT, {**body, "tools": tools}, LOCAL).run()
    (choice,) = found["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert [call["function"]["arguments"] for call in choice["message"]["tool_calls"]] == ['{"city": "Bern"}']
    assert choice["message"]["content"] is None
    # one character is one token here: what came after the call was neither computed nor charged
    assert found["usage"]["completion_tokens"] < len(text)
    assert engine.generations[0].cancelled


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder", "llama", "mistral", "mistral_v11", "pythonic"])
def test_a_call_that_was_cut_short_is_text_and_not_malformed(form: str) -> None:
    cut = {
        "hermes": CUT,
        "qwen3_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nBe",
        "llama": '{"name": "weather", "parameters": {"city": "Be',
        "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Be',
        "mistral_v11": '[TOOL_CALLS]weather[ARGS]{"city": "Be',
        "pythonic": '[weather(city="Be',
    }[form]
    for reason, expected in (("length", 0), ("stop", 1)):
        malformed: list[int] = []
        parser = CallParser(
            TOOL_FORMATS.new(form), {"weather": None}, on_malformed=partial(malformed.append, 1)
        )
        choice = AnswerChoice(parser)
        choice.take(Event(cut, (1,), ()))
        choice.take(Event("", (2,), (), reason))  # type: ignore[arg-type]
        assert (choice.text, len(malformed)) == (cut, expected), reason
