"""Fields that users of OpenAI's clients, LangChain and vLLM commonly send, and their effect."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from gym_fed.config.serving import StoredAnswersConfig
from gym_fed.serving.engine.request import GenerationRequest
from gym_fed.serving.openai.catalogue import LOCAL, Caller, Catalogue
from gym_fed.serving.openai.prompts import texts_of
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.responses import RESPONSES
from gym_fed.serving.openai.schemas import AssistantMessage
from gym_fed.serving.openai.service import CHAT, COMPLETIONS, OpenAIService
from gym_fed.serving.openai.stored_answers import StoredAnswers
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tool_templates import source_of

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


@pytest.fixture
def tokenizer(nano_tokenizer: Any) -> Iterator[Any]:
    before, nano_tokenizer.chat_template = nano_tokenizer.chat_template, source_of("hermes")
    yield nano_tokenizer
    nano_tokenizer.chat_template = before


def service(
    tokenizer: Any, engine: ScriptedEngine, config: StoredAnswersConfig | None = None
) -> OpenAIService:
    return OpenAIService(
        engine,  # type: ignore[arg-type]
        Catalogue("nano"),
        tokenizer,
        vocab_size=262,
        fingerprint="fp_1",
        max_at_once=20,
        stored=StoredAnswers(config or StoredAnswersConfig()),
    )


def prompt_of(tokenizer: Any, url: str, **fields: Any) -> list[int]:
    engine = ScriptedEngine()
    service(tokenizer, engine).begin(url, {"model": "nano", **fields}, LOCAL).run()
    return engine.requests[0].prompt_ids


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{**USER, "name": "ann"}]},
        {
            "messages": [USER],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {}, "description": "what it is"},
            },
        },
    ],
)
def test_names_and_descriptions_are_accepted_and_change_no_prompt(
    tokenizer: Any, fields: dict[str, Any]
) -> None:
    assert prompt_of(tokenizer, CHAT, **fields) == prompt_of(tokenizer, CHAT, messages=[USER])


NOTHING_ASKED: dict[str, Any] = {
    **dict.fromkeys(("use_beam_search", "include_stop_str_in_output", "return_token_ids"), False),
    "spaces_between_special_tokens": True,
    **dict.fromkeys(("logits_processors", "kv_transfer_params", "vllm_xargs")),
}
NOTHING_ASKED_OF_CHAT: dict[str, Any] = {"echo": False, "mm_processor_kwargs": None}


@pytest.mark.parametrize(
    ("url", "field"),
    [
        *((url, field) for url in (CHAT, COMPLETIONS, RESPONSES) for field in NOTHING_ASKED),
        *((CHAT, field) for field in NOTHING_ASKED_OF_CHAT),
    ],
)
def test_fields_of_vllm_that_ask_for_nothing_are_accepted_and_others_refused_by_name(
    tokenizer: Any, url: str, field: str
) -> None:
    asked: dict[str, Any] = {
        CHAT: {"messages": [USER]},
        COMPLETIONS: {"prompt": "x"},
        RESPONSES: {"input": "x"},
    }
    value = {**NOTHING_ASKED, **NOTHING_ASKED_OF_CHAT}[field]
    plain = prompt_of(tokenizer, url, **asked[url])
    assert prompt_of(tokenizer, url, **asked[url], **{field: value}) == plain
    with pytest.raises(RequestError, match=f"field '{field}' is not supported by this server") as caught:
        prompt_of(tokenizer, url, **asked[url], **{field: not value if isinstance(value, bool) else {"a": 1}})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("url", "field", "instead"),
    [
        (CHAT, "repeat_penalty", "repetition_penalty"),
        (CHAT, "n_predict", "use max_tokens"),
        (COMPLETIONS, "num_predict", "use max_tokens"),
        (RESPONSES, "n_predict", "use max_output_tokens"),
        (RESPONSES, "max_tokens", "use max_output_tokens"),
        (COMPLETIONS, "grammar", "use guided_grammar"),
        (CHAT, "json_schema", "use response_format"),
        (CHAT, "format", "use response_format"),
        (COMPLETIONS, "json_schema", "use guided_json"),
        (CHAT, "think", "use reasoning_effort"),
        (RESPONSES, "think", "use reasoning"),
        (CHAT, "n_probs", "use top_logprobs"),
        (COMPLETIONS, "n_probs", "use logprobs"),
        (CHAT, "cache_prompt", "omit it"),
        (CHAT, "keep_alive", "omit it"),
        (CHAT, "options", "top-level fields of the request"),
        (CHAT, "num_ctx", "engine.max_context"),
    ],
)
def test_a_field_of_another_server_is_refused_with_what_it_is_here(
    tokenizer: Any, url: str, field: str, instead: str
) -> None:
    asked: dict[str, Any] = {
        CHAT: {"messages": [USER]},
        COMPLETIONS: {"prompt": "x"},
        RESPONSES: {"input": "x"},
    }
    with pytest.raises(RequestError, match=f"unknown field '{field}'") as caught:
        prompt_of(tokenizer, url, **asked[url], **{field: 1})
    assert instead in str(caught.value.hint)
    assert (caught.value.param, caught.value.name) == (field, "unknown_parameter")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": [{"type": "text", "text": "x", "cache_control": {}}]}, "content[0].cache_control"),
        ({"content": [{"type": "text"}]}, "content[0].text"),
        ({"content": [{"type": "text", "text": 5}]}, "content[0].text"),
        ({"content": []}, "content"),
        ({"content": 5}, "content"),
        ({"content": [{"type": "image_url", "image_url": {}}]}, "content[0].image_url.url"),
        ({"content": [{"type": "image_url", "image_url": {"url": "x"}, "a": 1}]}, "content[0].a"),
    ],
)
def test_what_is_off_within_a_content_is_named(tokenizer: Any, message: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        prompt_of(tokenizer, CHAT, messages=[{"role": "user", **message}])
    assert caught.value.param == f"messages[0].{param}"
    if "image_url" not in str(message):
        with pytest.raises(RequestError) as caught:
            prompt_of(tokenizer, CHAT, messages=[{"role": "system", **message}])
        assert caught.value.param == f"messages[0].{param}"


@pytest.mark.parametrize(
    ("url", "fields", "param", "said"),
    [
        (
            CHAT,
            {"response_format": {"type": "structural_tag", "format": {}}},
            "response_format",
            "response_format of type 'structural_tag' are not supported by this server, only text, "
            "json_object, json_schema",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}, "a": 1}},
            "response_format.a",
            "unknown field",
        ),
        (
            RESPONSES,
            {"text": {"format": {"type": "grammar"}}},
            "text.format",
            "formats of type 'grammar' are not supported by this server, only text, json_object, json_schema",
        ),
        (
            CHAT,
            {"tools": [{"type": "custom", "custom": {"name": "f"}}]},
            "tools[0]",
            "tools of type 'custom' are not supported by this server, only function",
        ),
    ],
)
def test_a_form_or_tool_of_an_unknown_type_is_refused_by_its_type(
    tokenizer: Any, url: str, fields: dict[str, Any], param: str, said: str
) -> None:
    asked: dict[str, Any] = {CHAT: {"messages": [USER]}, RESPONSES: {"input": "x"}}
    with pytest.raises(RequestError, match=said) as caught:
        prompt_of(tokenizer, url, **asked[url], **fields)
    assert caught.value.param == param


def called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]


def test_a_call_without_arguments_may_have_none_written(tokenizer: Any) -> None:
    empty = prompt_of(tokenizer, CHAT, messages=called("{}"))
    assert prompt_of(tokenizer, CHAT, messages=called("")) == empty
    for wrong in ("[]", "x", None, 0):
        with pytest.raises(RequestError):
            prompt_of(tokenizer, CHAT, messages=called(wrong))  # type: ignore[arg-type]
    items = [{"role": "user", "content": "hi"}, {**CALL, "arguments": ""}]
    assert prompt_of(tokenizer, RESPONSES, input=items) == prompt_of(
        tokenizer, RESPONSES, input=[items[0], CALL]
    )


THINKING = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content is string %}<{{ m.reasoning_content }}>"
    "{% endif %}{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_what_an_earlier_turn_thought_is_shown_where_the_template_reads_it(
    tokenizer: Any, field: str
) -> None:
    def prompt(**more: str) -> str:
        turns = [USER, {"role": "assistant", "content": "yes", **more}, USER]
        return str(tokenizer.decode(prompt_of(tokenizer, CHAT, messages=turns)))

    plain = prompt()
    assert prompt(**{field: "hm"}) == plain
    tokenizer.chat_template = THINKING
    assert "assistant:yes" in prompt()
    assert "assistant:<hm>yes" in prompt(**{field: "hm"})
    assert "assistant:<hm>yes" in prompt(reasoning="hm", reasoning_content="hm")
    with pytest.raises(RequestError, match="differ") as caught:
        prompt(reasoning="hm", reasoning_content="ah")
    assert caught.value.param == "messages[1].reasoning"


def test_a_filter_reads_what_an_earlier_turn_thought() -> None:
    turn = AssistantMessage(role="assistant", content="yes", reasoning_content="hm")
    assert list(texts_of([turn], None)) == ["yes", "hm"]


def test_a_refusal_of_an_earlier_answer_is_text_that_the_model_wrote(tokenizer: Any) -> None:
    def asked(content: Any) -> list[int]:
        return prompt_of(tokenizer, CHAT, messages=[USER, {"role": "assistant", "content": content}, USER])

    parts = [{"type": "text", "text": "Well. "}, {"type": "refusal", "refusal": "No."}]
    assert asked(parts) == asked("Well. No.")
    for wrong in ([{"type": "refusal", "refusal": 1}], [{"type": "refusal"}]):
        with pytest.raises(RequestError) as caught:
            asked(wrong)
        assert str(caught.value.param).startswith("messages[1].content")
    with pytest.raises(RequestError):
        prompt_of(tokenizer, CHAT, messages=[{"role": "user", "content": parts}])


def test_responses_without_tools_may_choose_automatically(tokenizer: Any) -> None:
    plain = prompt_of(tokenizer, RESPONSES, input="hi")
    assert prompt_of(tokenizer, RESPONSES, input="hi", tools=[], tool_choice="auto") == plain
    assert prompt_of(tokenizer, RESPONSES, input="hi", tool_choice="auto") == plain
    with pytest.raises(RequestError) as caught:
        prompt_of(tokenizer, RESPONSES, input="hi", tools=[], tool_choice="required")
    assert caught.value.param == "tool_choice"


def test_a_call_may_have_returned_nothing(tokenizer: Any) -> None:
    def asked(output: Any) -> list[int]:
        result = {"type": "function_call_output", "call_id": "c1", "output": output}
        return prompt_of(tokenizer, RESPONSES, input=[USER, CALL, result])

    assert asked([]) == asked("")
    with pytest.raises(RequestError) as caught:
        prompt_of(tokenizer, RESPONSES, input=[{"role": "user", "content": []}])
    assert caught.value.param == "input[0].content"


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS, RESPONSES])
def test_a_cache_salt_is_a_prompt_cache_key(tokenizer: Any, url: str) -> None:
    given: dict[str, Any] = {
        CHAT: {"messages": [USER]},
        COMPLETIONS: {"prompt": "x"},
        RESPONSES: {"input": "x"},
    }
    engine = ScriptedEngine()
    served = service(tokenizer, engine)
    for more in (
        {},
        {"cache_salt": "s"},
        {"prompt_cache_key": "s"},
        {"cache_salt": "s", "prompt_cache_key": "s"},
    ):
        served.begin(url, {"model": "nano", **given[url], **more}, LOCAL).run()
    assert [request.cache_key for request in engine.requests] == ["", "s", "s", "s"]


def test_a_request_carries_the_digest_of_its_key(tokenizer: Any) -> None:
    engine = ScriptedEngine()
    caller = Caller("ann", key_sha256="abc")
    service(tokenizer, engine).begin(CHAT, {"model": "nano", "messages": [USER]}, caller).run()
    assert (engine.requests[0].user, engine.requests[0].key_digest) == ("ann", "abc")


@pytest.mark.parametrize("include_usage", [True, False])
def test_a_chat_that_is_too_large_to_keep_says_so(tokenizer: Any, include_usage: bool) -> None:
    body = {"model": "nano", "messages": [USER], "store": True}
    for length, kept in ((10, True), (5000, False)):
        engine = ScriptedEngine(partial(_letters, length))
        served = service(tokenizer, engine, StoredAnswersConfig(bytes_per_key=4096))
        whole = served.begin(CHAT, body, LOCAL).run()
        assert whole.get("store") == (None if kept else False)
        options = {"stream": True, "stream_options": {"include_usage": include_usage}}
        chunks = list(served.begin(CHAT, {**body, **options}, LOCAL).chunks())
        assert [chunk.get("store") for chunk in chunks[-2:]] == [None, None if kept else False]
        assert [bool(chunk.get("usage")) for chunk in chunks[-2:]] == [False, include_usage]
        ends = [one["finish_reason"] for chunk in chunks for one in chunk["choices"] if one["finish_reason"]]
        assert ends == ["stop"]


@pytest.mark.parametrize("url", [CHAT, RESPONSES])
async def test_an_answer_is_stored_beside_the_event_loop(
    tokenizer: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    put = StoredAnswers.put

    def seen(self: StoredAnswers, *given: Any) -> bool:
        threads.append(threading.get_ident())
        return put(self, *given)

    monkeypatch.setattr(StoredAnswers, "put", seen)
    served = service(tokenizer, ScriptedEngine())
    given: dict[str, Any] = {"messages": [USER]} if url == CHAT else {"input": "hi"}
    found = await served.begin(url, {"model": "nano", **given, "store": True}, LOCAL).arun()
    assert served.stored(url, found["id"], LOCAL) == found
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def _letters(length: int, request: GenerationRequest) -> str:
    return "x" * length
