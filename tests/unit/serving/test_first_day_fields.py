"""Fields that users of OpenAI's clients, LangChain and vLLM send on their first day, and what becomes of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from gym_fed.config.serving import StoredAnswersConfig
from gym_fed.serving.engine.request import GenerationRequest
from gym_fed.serving.openai.catalogue import LOCAL, Caller, Catalogue
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.responses import RESPONSES
from gym_fed.serving.openai.service import CHAT, COMPLETIONS, OpenAIService
from gym_fed.serving.openai.stored_answers import StoredAnswers
from tests.support.scripted_engine import ScriptedEngine
from tests.support.tool_templates import source_of

USER = {"role": "user", "content": "hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


@pytest.fixture(scope="module")
def nano_tokenizer() -> Any:
    from gym_fed.models import load_tokenizer

    return load_tokenizer("gym-nano")


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
