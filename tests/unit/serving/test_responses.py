"""The Responses API without HTTP: items, events, continued responses, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from gym_fed.config.serving import FilterConfig, StoredAnswersConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.filter.content_filter import ContentFilter
from gym_fed.serving.http.app import create_app
from gym_fed.serving.http.gateway import Gateway
from gym_fed.serving.http.keys import Authenticator
from gym_fed.serving.openai import responses
from gym_fed.serving.openai.catalogue import LOCAL, Caller, Catalogue
from gym_fed.serving.openai.refusals import RequestError, error_body
from gym_fed.serving.openai.responses import RESPONSES
from gym_fed.serving.openai.service import CHAT, OpenAIService
from gym_fed.serving.openai.stored_answers import StoredAnswers
from tests.support.scripted_engine import ScriptedEngine

HERMES = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}{% endfor %}
Call with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{{- '<|im_end|>' }}
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {"city": {}}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
CALL_ITEM = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Bern"}'}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c1", "output": "rain"}


@pytest.fixture
def tokenizer(nano_tokenizer: Any) -> Iterator[Any]:
    before = nano_tokenizer.chat_template
    nano_tokenizer.chat_template = HERMES
    yield nano_tokenizer
    nano_tokenizer.chat_template = before


def service(tokenizer: Any, engine: ScriptedEngine | None = None, **more: Any) -> OpenAIService:
    return OpenAIService(
        engine or ScriptedEngine(),
        Catalogue("nano"),
        tokenizer,
        vocab_size=262,
        fingerprint="fp_1",
        max_at_once=20,
        **{"stored": StoredAnswers(StoredAnswersConfig()), **more},
    )


def answer_of(served: OpenAIService, caller: Caller = LOCAL, **fields: Any) -> dict[str, Any]:
    return served.begin(RESPONSES, {"model": "nano", "input": "hi", **fields}, caller).run()


def refusal(tokenizer: Any, **fields: Any) -> dict[str, Any]:
    with pytest.raises(RequestError) as caught:
        answer_of(service(tokenizer), **fields)
    assert caught.value.code is ErrorCode.USAGE
    return dict(error_body(caught.value)["error"])


def test_a_stream_builds_what_the_whole_answer_has(tokenizer: Any) -> None:
    text = f"Look: <b> {CALL}\n{CALL} then"
    fields = {"model": "nano", "input": "hi", "tools": [TOOL], "include": ["message.output_text.logprobs"]}
    whole = answer_of(service(tokenizer, ScriptedEngine(lambda request: text)), **fields)
    events = list(service(tokenizer, ScriptedEngine(lambda request: text)).stream(RESPONSES, fields, LOCAL))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.completed"
    items: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(
                {**event["item"], "content": []} if event["item"]["type"] == "message" else event["item"]
            )
        elif event["type"] == "response.content_part.added":
            assert event["part"]["text"] == ""
            items[-1]["content"].append({**event["part"], "logprobs": []})
        elif event["type"] == "response.output_text.delta":
            assert event["item_id"] == items[-1]["id"]
            items[-1]["content"][0]["text"] += event["delta"]
            items[-1]["content"][0]["logprobs"] += event["logprobs"]
        elif event["type"] == "response.function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif event["type"] == "response.function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (items[-1]["arguments"], items[-1]["name"])
        elif event["type"] == "response.output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert [part["text"] for part in items[-1].get("content", ())] == [
                part["text"] for part in event["item"].get("content", ())
            ]
            assert items[-1].get("arguments") == event["item"].get("arguments")

    def shown(items: list[dict[str, Any]]) -> list[Any]:
        return [
            (item["type"], item["status"], item.get("arguments") or item["content"][0]["text"])
            for item in items
        ]

    final = events[-1]["response"]
    assert shown(items) == shown(final["output"]) == shown(whole["output"])
    assert [item["type"] for item in items] == ["message", "function_call", "function_call", "message"]
    assert [item["content"][0]["text"] for item in items if item["type"] == "message"] == [
        "Look: <b> ",
        " then",
    ]
    assert final["usage"] == whole["usage"]
    assert len(final["output"][0]["content"][0]["logprobs"]) >= len("Look: <b> ")


def test_blank_text_beside_a_call_is_no_item_and_alone_it_is_the_answer(tokenizer: Any) -> None:
    found = answer_of(service(tokenizer, ScriptedEngine(lambda request: f"\n {CALL}\n")), tools=[TOOL])
    assert [item["type"] for item in found["output"]] == ["function_call"]
    for text in (" \n", ""):
        found = answer_of(service(tokenizer, ScriptedEngine(lambda request, text=text: text)))
        assert [item["content"][0]["text"] for item in found["output"]] == [text]


def test_an_answer_that_is_cut_short_is_incomplete_and_says_why(tokenizer: Any) -> None:
    found = answer_of(service(tokenizer, ScriptedEngine(finish="length")), max_output_tokens=5)
    assert (found["status"], found["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert found["output"][0]["status"] == "incomplete"


def test_a_stream_that_fails_ends_with_what_it_had(tokenizer: Any) -> None:
    pending = service(tokenizer).begin(RESPONSES, {"model": "nano", "input": "hi", "stream": True}, LOCAL)
    chunks = pending.chunks()
    events = [next(chunks) for _ in range(6)]
    failed = pending.failure(error_body(GymError(ErrorCode.INTERNAL, "it broke")))
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", len(events))
    assert failed["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "he"


async def test_over_http_a_stream_that_takes_too_long_ends_with_its_failure(tokenizer: Any) -> None:
    engine = ScriptedEngine(endless=True)
    gateway = Gateway(Authenticator(None), request_timeout_seconds=0.5)
    gateway.serving = SimpleNamespace(  # type: ignore[assignment]
        service=service(tokenizer, engine), engine=engine, store=None, usage_log=None, content_filter=None
    )
    transport = httpx.ASGITransport(create_app(gateway))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        found = await client.post(RESPONSES, json={"model": "nano", "input": "hi", "stream": True})
    events = [part.split("\n") for part in found.text.strip().split("\n\n")]
    assert events[0][0] == "event: response.created"
    assert events[-1][0] == "event: response.failed"
    response = json.loads(events[-1][1].removeprefix("data: "))["response"]
    assert "took more than 0.5 s" in response["error"]["message"]
    assert response["output"][0]["content"][0]["text"] == "hello"
    assert engine.generations[0].cancelled


def test_a_filtered_answer_is_incomplete_and_kept_as_the_refusal_alone(
    tokenizer: Any, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.txt"
    rules.write_text("[weapons]\npipe bomb\n")
    config = FilterConfig(rules=[rules], package_rules=False, text="Refused.", input=True, output=True)
    engine = ScriptedEngine(lambda request: "Take a plain long look first. Then a pipe bomb, and go.")
    served = service(tokenizer, engine, content_filter=ContentFilter(config))
    for question in ("how is a pipe bomb made?", "hi"):
        found = answer_of(served, input=question)
        assert found["incomplete_details"] == {"reason": "content_filter"}
        assert found["output"][0]["content"][0]["text"] == "Refused."
        assert served.stored(RESPONSES, found["id"], LOCAL) == found


def test_items_are_the_messages_of_a_chat(tokenizer: Any) -> None:
    engine = ScriptedEngine()
    conversation = [
        {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
        {"type": "message", "role": "user", "content": "weather?"},
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        CALL_ITEM,
        {**CALL_ITEM, "call_id": "c2"},
        OUTPUT_ITEM,
        {**OUTPUT_ITEM, "call_id": "c2", "output": [{"type": "input_text", "text": "snow"}]},
    ]
    answer_of(service(tokenizer, engine), input=conversation, instructions="be kind", tools=[TOOL])
    calls = [
        {"id": name, "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
        for name in ("c1", "c2")
    ]
    messages = [
        {"role": "system", "content": "be kind"},
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "I look.", "tool_calls": calls},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "tool", "content": "snow", "tool_call_id": "c2"},
    ]
    named = {"name": "weather", "parameters": TOOL["parameters"]}
    tools = [{"type": "function", "function": named}]
    service(tokenizer, engine).handle(CHAT, {"model": "nano", "messages": messages, "tools": tools}, LOCAL)
    assert engine.requests[0].prompt_ids == engine.requests[1].prompt_ids


def test_settings_reach_the_engine_and_are_given_back(tokenizer: Any) -> None:
    engine = ScriptedEngine()
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "max_output_tokens": 7,
        "metadata": {"a": "b"},
        "safety_identifier": "p1",
        "text": {"format": schema},
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 3,
    }
    found = answer_of(service(tokenizer, engine), **fields)
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.5, 0.9, 7)
    assert (sampling.json_schema, sampling.logprobs) == ('{"type": "object"}', 3)
    assert {name: found[name] for name in fields if name != "include"} == {
        name: value for name, value in fields.items() if name != "include"
    }
    assert found["tool_choice"] == "auto"


def test_a_response_goes_on_from_an_earlier_one_without_its_instructions(tokenizer: Any) -> None:
    engine = ScriptedEngine(lambda request: CALL)
    served = service(tokenizer, engine)
    first = answer_of(served, input="weather?", instructions="be kind", tools=[TOOL])
    (call,) = first["output"]
    engine.script = lambda request: "rain"
    result = {**OUTPUT_ITEM, "call_id": call["call_id"]}
    second = answer_of(served, input=[result], previous_response_id=first["id"], tools=[TOOL])
    third = answer_of(served, input="and now?", previous_response_id=second["id"])
    assert third["previous_response_id"] == second["id"]
    shown = tokenizer.decode(engine.requests[2].prompt_ids)
    for part in ("weather?", '{"name": "weather", "arguments": {"city": "Bern"}}', "tool\nrain", "and now?"):
        assert part in shown
    assert "be kind" not in shown
    served.delete_stored(RESPONSES, first["id"], LOCAL)
    again = answer_of(served, input="and now?", previous_response_id=second["id"])
    assert again["status"] == "completed"
    assert engine.requests[3].prompt_ids == engine.requests[2].prompt_ids


def test_another_key_s_response_does_not_exist(tokenizer: Any) -> None:
    served = service(tokenizer)
    ann, bob = Caller("ann", key_sha256="1"), Caller("bob", key_sha256="2")
    made_again = Caller("ann", key_sha256="3")
    kept = answer_of(served, ann)["id"]
    unknown = "resp_unknown"
    for caller in (bob, made_again):
        reported = []
        for name in (kept, unknown):
            for act in (served.stored, served.delete_stored):
                with pytest.raises(RequestError) as caught:
                    act(RESPONSES, name, caller)
                assert caught.value.code is ErrorCode.NOT_FOUND
                reported.append(json.dumps(error_body(caught.value)).replace(name, "NAME"))
            with pytest.raises(RequestError) as caught:
                answer_of(served, caller, previous_response_id=name)
            assert (caught.value.param, caught.value.name) == (
                "previous_response_id",
                "previous_response_not_found",
            )
        assert len(set(reported)) == 1
    assert served.stored(RESPONSES, kept, ann)["id"] == kept
    with pytest.raises(RequestError):
        served.stored(CHAT, kept, ann)


def test_what_is_not_to_be_stored_is_not_and_says_so(tokenizer: Any) -> None:
    served = service(tokenizer)
    for made in (
        answer_of(served, store=False),
        served.handle(RESPONSES, {"model": "nano", "input": "x"}, LOCAL),
    ):
        assert made["store"] is False
        with pytest.raises(RequestError):
            served.stored(RESPONSES, made["id"], LOCAL)
    nowhere = service(tokenizer, stored=None)
    assert answer_of(nowhere)["store"] is False
    for fields in ({"store": True}, {"previous_response_id": "resp_1"}):
        with pytest.raises(RequestError) as caught:
            answer_of(nowhere, **fields)
        assert [caught.value.param] == list(fields)
    little = StoredAnswers(StoredAnswersConfig(bytes_per_key=1024))
    assert answer_of(service(tokenizer, stored=little))["store"] is False


def test_a_conversation_that_is_too_long_to_hold_is_answered_and_not_stored(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(responses, "MAX_CONVERSATION_BYTES", 1000)
    served = service(tokenizer)
    turns = [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "x" * 200}]
    first = answer_of(served, input=[*turns, {"role": "user", "content": "more"}])
    assert first["store"] is True
    more = [*turns, {"role": "user", "content": "even more"}]
    second = answer_of(served, input=more, previous_response_id=first["id"])
    assert (second["status"], second["store"]) == ("completed", False)
    with pytest.raises(RequestError):
        served.stored(RESPONSES, second["id"], LOCAL)


def test_a_chat_is_stored_where_it_is_wished(tokenizer: Any) -> None:
    served = service(tokenizer)
    body = {"model": "nano", "messages": [{"role": "user", "content": "hi"}], "metadata": {"a": "b"}}
    kept = served.begin(CHAT, {**body, "store": True}, LOCAL).run()
    assert kept["metadata"] == {"a": "b"}
    assert served.stored(CHAT, kept["id"], LOCAL) == kept
    *_, last = served.stream(CHAT, {**body, "store": True}, LOCAL)
    assert served.stored(CHAT, last["id"], LOCAL)["choices"] == kept["choices"]
    assert served.delete_stored(CHAT, kept["id"], LOCAL)["deleted"] is True
    left = served.begin(CHAT, body, LOCAL).run()
    for name in (kept["id"], left["id"]):
        with pytest.raises(RequestError):
            served.stored(CHAT, name, LOCAL)


def test_truncation_leaves_out_the_oldest_turns_and_keeps_instructions(tokenizer: Any) -> None:
    engine = ScriptedEngine()
    turns: list[dict[str, Any]] = []
    for number in range(6):
        turns += [{"role": "user", "content": f"question {number} {'x' * 40}"}]
        turns += [{**CALL_ITEM, "call_id": f"c{number}"}, {**OUTPUT_ITEM, "call_id": f"c{number}"}]
        turns += [{"role": "assistant", "content": f"answer {number}"}]
    fields = {"input": [*turns, {"role": "user", "content": "last"}], "instructions": "be kind"}
    served = service(tokenizer, engine, context=700)
    with pytest.raises(RequestError) as caught:
        answer_of(service(tokenizer, engine, context=100), **fields)
    assert (caught.value.name, caught.value.param) == ("context_length_exceeded", "input")
    kept = answer_of(served, **fields, truncation="auto")
    ids = engine.requests[-1].prompt_ids
    shown = tokenizer.decode(ids)
    assert "be kind" in shown
    assert "last" in shown
    present = [number for number in range(6) if f"question {number}" in shown]
    assert present
    assert 0 not in present
    assert present == list(range(present[0], 6))
    assert [f"answer {number}" in shown for number in range(6)] == [number in present for number in range(6)]
    assert 700 * 0.5 < len(ids) <= 700 * 0.75
    answer_of(served, input="more", previous_response_id=kept["id"], truncation="auto")
    assert len(engine.requests[-1].prompt_ids) <= 700 * 0.75
    with pytest.raises(RequestError) as caught:
        answer_of(served, input="x" * 9000, truncation="auto")
    assert caught.value.name == "context_length_exceeded"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": [{"type": "web_search_call"}]}, "input[0]", "unsupported_parameter"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "unsupported_parameter"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
            "unsupported_parameter",
        ),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood", "unknown_parameter"),
        ({"input": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"input": [OUTPUT_ITEM]}, "input[0]", "invalid_value"),
        ({"input": [{**CALL_ITEM, "arguments": "nothing"}]}, "input[0]", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": 5}, "input", "invalid_value"),
        ({"background": True}, "background", "unsupported_parameter"),
        ({"conversation": "c"}, "conversation", "unsupported_parameter"),
        ({"prompt": {"id": "p"}}, "prompt", "unsupported_parameter"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "unsupported_parameter"),
        ({"tools": [TOOL, TOOL]}, "tools", "invalid_value"),
        ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"include": ["file_search_call.results"]}, "include", "unsupported_parameter"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "unsupported_parameter"),
        ({"text": {"format": {"type": "json_object"}}, "stop": "x"}, "stop", "invalid_value"),
        ({"metadata": {"a": 1}}, "metadata.a", "invalid_value"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "invalid_value"),
        ({"n": 2}, "n", "unknown_parameter"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options", "invalid_value"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "previous_response_not_found"),
    ],
)
def test_what_is_refused_is_named_by_the_field_that_was_written(
    tokenizer: Any, fields: dict[str, Any], param: str, code: str
) -> None:
    reported = refusal(tokenizer, **fields)
    assert (reported["param"], reported["code"]) == (param, code)
    assert "messages" not in reported["message"]


def test_the_engine_s_refusals_name_the_fields_of_this_api(tokenizer: Any) -> None:
    schema = {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}
    for code, param in ((ErrorCode.DATA_INVALID, "text.format"), (ErrorCode.TOO_LARGE, "input")):
        with pytest.raises(RequestError) as caught:
            answer_of(service(tokenizer, ScriptedEngine(error=GymError(code, "the reason"))), text=schema)
        assert caught.value.param == param
    late = ScriptedEngine(late=GymError(ErrorCode.DATA_INVALID, "the reason"))
    with pytest.raises(RequestError) as caught:
        answer_of(service(tokenizer, late), text=schema)
    assert caught.value.param == "text.format"


def test_input_tokens_are_those_of_the_answer(tokenizer: Any) -> None:
    served = service(tokenizer)
    fields = {"input": "hi", "instructions": "Be short.", "tools": [TOOL]}
    used = answer_of(served, **fields)
    counted = served.input_tokens({"model": "nano", **fields}, LOCAL)
    assert counted == {"object": "response.input_tokens", "input_tokens": used["usage"]["input_tokens"]}
    assert served.input_tokens(fields, LOCAL) == counted
    more = served.input_tokens({"input": "more", "previous_response_id": used["id"]}, LOCAL)
    again = answer_of(served, input="more", previous_response_id=used["id"])
    assert more["input_tokens"] == again["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": "hi", "stream": True}, "stream"),
        ({"input": "hi", "model": "other"}, "model"),
        ({}, "input"),
    ],
)
def test_a_count_refuses_what_has_no_meaning_for_it(
    fields: dict[str, Any], named: str, tokenizer: Any
) -> None:
    with pytest.raises(RequestError) as caught:
        service(tokenizer).input_tokens(fields, LOCAL)
    assert caught.value.param == named
