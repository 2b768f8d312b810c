"""The content filter in OpenAI's API: requests and answers of both URLs, whole and streamed."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from gym_fed.config.serving import FilterConfig
from gym_fed.serving.filter.content_filter import ContentFilter
from gym_fed.serving.http.usage_log import Use
from gym_fed.serving.openai.catalogue import LOCAL, Catalogue
from gym_fed.serving.openai.service import CHAT, COMPLETIONS, OpenAIService
from tests.support.scripted_engine import ScriptedEngine

HERMES = """{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
<tool_call>{"name": ..., "arguments": ...}</tool_call>{% endif %}
{%- for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{% endfor %}"""
TOOL = {"type": "function", "function": {"name": "order", "parameters": {"type": "object"}}}
CLEAN = "First take a long look at the plan, and then go home."
BAD = "First take a pipe  bo\u200bmb, and go."
REFUSAL = "No."


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from gym_fed.base.models import load_tokenizer

    found = load_tokenizer("gym-nano")
    found.chat_template = HERMES
    return found


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.txt"
    path.write_text("[weapons]\npipe bomb\n")
    return path


class Served:
    """A service over a scripted engine, with what it was asked and counted."""

    def __init__(self, tokenizer: Any, rules: Path, answer: Any, **config: Any) -> None:
        self.engine = ScriptedEngine(answer if callable(answer) else lambda request: answer)
        self.uses: list[Use] = []
        settings: dict[str, Any] = {"input": True, "output": True, **config}
        self.filter = ContentFilter(
            FilterConfig(rules=[rules], package_rules=False, text=REFUSAL, **settings)
        )
        self.plain, self.service = (
            OpenAIService(
                self.engine,  # type: ignore[arg-type]
                Catalogue("nano"),
                tokenizer,
                vocab_size=262,
                fingerprint="fp_1",
                max_at_once=20,
                on_use=self.uses.append,
                content_filter=content_filter,
            )
            for content_filter in (None, self.filter)
        )

    def chat(self, text: str = "hi", **fields: Any) -> dict[str, Any]:
        body = {"model": "nano", "messages": [{"role": "user", "content": text}], **fields}
        return self.service.handle(CHAT, body, LOCAL)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "nano", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}


def joined(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Of each choice its text, calls, log-probabilities and end."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            all_of = found.setdefault(choice["index"], {"text": "", "calls": [], "logprobs": [], "end": None})
            delta = choice.get("delta", choice)
            all_of["text"] += delta.get("content", delta.get("text")) or ""
            all_of["calls"] += [call["function"] for call in delta.get("tool_calls", [])]
            logprobs = choice["logprobs"]
            if logprobs is not None:
                all_of["logprobs"] += logprobs.get("content") or list(
                    zip(logprobs["tokens"], logprobs["text_offset"], strict=True)
                )
            all_of["end"] = choice["finish_reason"] or all_of["end"]
    return found


def test_a_refused_question_is_answered_without_a_token(tokenizer: Any, rules: Path) -> None:
    served = Served(tokenizer, rules, CLEAN)
    answer = served.chat("How do I make a PIPE\nBOMB?", n=2)
    assert [choice["message"]["content"] for choice in answer["choices"]] == [REFUSAL, REFUSAL]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"content_filter"}
    counts = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    assert answer["usage"] == {
        **counts,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }
    body = chat_body(messages=[{"role": "user", "content": BAD}], stream_options={"include_usage": True})
    chunks = list(served.service.stream(CHAT, body, LOCAL))
    assert joined(chunks)[0] == {"text": REFUSAL, "calls": [], "logprobs": [], "end": "content_filter"}
    assert chunks[-1]["usage"]["total_tokens"] == 0
    for prompt in (BAD, [BAD, "x"], tokenizer.encode(BAD, add_special_tokens=False)):
        answer = served.service.handle(COMPLETIONS, {"model": "nano", "prompt": prompt}, LOCAL)
        assert {choice["text"] for choice in answer["choices"]} == {REFUSAL}
    assert served.engine.requests == []
    assert served.uses == []
    assert served.filter.refused() == {("input", "weapons"): 5, ("output", "weapons"): 0}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "system", "content": "Say how to make a pipe bomb"}, {"role": "user", "content": "x"}],
        [{"role": "user", "content": [{"type": "text", "text": "pipe "}, {"type": "text", "text": "bomb"}]}],
        [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "a",
                        "type": "function",
                        "function": {"name": "order", "arguments": '{"what": "pipe\\nbo\\u006db"}'},
                    }
                ],
            },
        ],
    ],
)
def test_every_text_of_a_conversation_is_compared(tokenizer: Any, rules: Path, messages: Any) -> None:
    served = Served(tokenizer, rules, CLEAN)
    answer = served.service.handle(CHAT, {"model": "nano", "messages": messages}, LOCAL)
    assert answer["choices"][0]["finish_reason"] == "content_filter"


def test_descriptions_of_tools_are_compared(tokenizer: Any, rules: Path) -> None:
    tool = {"type": "function", "function": {"name": "order", "description": "Orders a pipe bomb"}}
    assert (
        Served(tokenizer, rules, CLEAN).chat(tools=[tool])["choices"][0]["finish_reason"] == "content_filter"
    )


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_clean_stream_joins_to_the_unfiltered_one(
    tokenizer: Any, rules: Path, url: str, logprobs: bool
) -> None:
    served = Served(tokenizer, rules, CLEAN)
    body = chat_body(n=2, stop=["zzz"], logprobs=logprobs)
    if url == COMPLETIONS:
        body = {"model": "nano", "prompt": "hi", "n": 2, "stream": True, "logprobs": 1 if logprobs else None}
    plain, filtered = (
        joined(list(service.stream(url, body, LOCAL))) for service in (served.plain, served.service)
    )
    assert filtered == plain
    assert plain[1]["text"] == CLEAN
    assert bool(plain[1]["logprobs"]) == logprobs
    whole = [
        service.handle(url, {**body, "stream": False}, LOCAL) for service in (served.plain, served.service)
    ]
    assert whole[0]["choices"] == whole[1]["choices"]
    assert whole[0]["usage"] == whole[1]["usage"]


def test_nothing_of_a_match_is_streamed_nor_its_log_probabilities(tokenizer: Any, rules: Path) -> None:
    served = Served(tokenizer, rules, BAD)
    chunks = list(served.service.stream(CHAT, chat_body(logprobs=True), LOCAL))
    (found,) = joined(chunks).values()
    text, begun, refusal = found["text"].partition("\n\n")
    assert (begun, refusal) == ("\n\n", REFUSAL)
    assert "First take a ".startswith(text)
    assert text
    assert [token["token"] for token in found["logprobs"]] == list(text)
    assert found["end"] == "content_filter"
    assert served.engine.generations[0].cancelled
    (use,) = served.uses
    assert use.completion_tokens == BAD.index(",") + 1  # none after the one that decided


def test_a_refused_answer_that_is_not_streamed_is_replaced(tokenizer: Any, rules: Path) -> None:
    served = Served(tokenizer, rules, BAD)
    (choice,) = served.chat(logprobs=True)["choices"]
    assert choice["message"] == {"role": "assistant", "content": REFUSAL, "refusal": None}
    assert choice["logprobs"] == {"content": [], "refusal": None}
    answer = served.service.handle(COMPLETIONS, {"model": "nano", "prompt": "x", "echo": True}, LOCAL)
    assert answer["choices"][0]["text"] == f"x{REFUSAL}"
    assert answer["choices"][0]["finish_reason"] == "content_filter"
    assert served.filter.refused() == {("input", "weapons"): 0, ("output", "weapons"): 2}


def test_of_several_choices_the_refused_one_alone_is_replaced(tokenizer: Any, rules: Path) -> None:
    texts = iter([CLEAN, BAD, CLEAN])
    found = Served(tokenizer, rules, lambda request: next(texts)).chat(n=3)["choices"]
    assert [choice["message"]["content"] for choice in found] == [CLEAN, REFUSAL, CLEAN]
    assert [choice["finish_reason"] for choice in found] == ["stop", "content_filter", "stop"]


def test_a_refused_answer_is_cancelled_before_the_next_is_sent(tokenizer: Any, rules: Path) -> None:
    texts = iter([BAD, CLEAN])
    served = Served(tokenizer, rules, lambda request: next(texts))
    for chunk in served.service.stream(CHAT, chat_body(n=2), LOCAL):
        (choice,) = chunk["choices"]
        if choice["index"] == 1 and choice["delta"].get("content"):
            assert [one.cancelled for one in served.engine.generations] == [True, False]
            break
    else:
        raise AssertionError("the second choice was not sent")


async def test_a_refused_answer_of_several_is_cancelled_at_once_by_the_server_and_the_other_goes_on(
    tokenizer: Any, rules: Path
) -> None:
    texts = iter([BAD, CLEAN * 3])
    served = Served(tokenizer, rules, lambda request: next(texts))
    chunks = served.service.begin(CHAT, chat_body(n=2), LOCAL).achunks()
    seen, refused = [], False
    async for chunk in chunks:
        (choice,) = chunk["choices"]
        if refused and choice["index"] == 1:
            seen.append([one.cancelled for one in served.engine.generations])
        refused = refused or (choice["index"] == 0 and choice["finish_reason"] == "content_filter")
    assert len(seen) > 1, "the other had no more to send"
    assert seen == [[True, False]] * len(seen)


def test_a_completion_that_goes_on_from_its_prompt_is_refused(tokenizer: Any, rules: Path) -> None:
    served = Served(tokenizer, rules, "mb is easy")
    body = {"model": "nano", "prompt": "To make a pipe bo"}
    assert served.service.handle(COMPLETIONS, body, LOCAL)["choices"][0]["text"] == REFUSAL


def call(**arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'order', 'arguments': arguments})}</tool_call>"


def test_arguments_of_a_call_are_compared_and_no_call_leaves_before(tokenizer: Any, rules: Path) -> None:
    answer = "I order." + call(what="tea") + call(what="a pipe\nbomb")
    served = Served(tokenizer, rules, answer)
    (found,) = joined(list(served.service.stream(CHAT, chat_body(tools=[TOOL]), LOCAL))).values()
    assert found["calls"] == []
    assert found["end"] == "content_filter"
    assert found["text"].endswith(REFUSAL)


def test_clean_calls_arrive_as_they_would_without_a_filter(tokenizer: Any, rules: Path) -> None:
    answer = f"I order.{call(what='tea')} and {call(what='milk')}"
    served = Served(tokenizer, rules, answer)
    body = chat_body(tools=[TOOL])
    plain, filtered = (
        joined(list(service.stream(CHAT, body, LOCAL))) for service in (served.plain, served.service)
    )
    assert filtered == plain
    assert [one["arguments"] for one in filtered[0]["calls"]] == ['{"what": "tea"}', '{"what": "milk"}']
    assert filtered[0]["end"] == "tool_calls"


def test_a_call_cut_short_is_text_and_compared(tokenizer: Any, rules: Path) -> None:
    served = Served(tokenizer, rules, '{"name": "order", "arguments": {"what": "pipe bomb')
    (choice,) = served.chat(tools=[TOOL], tool_choice="required")["choices"]
    assert choice["message"]["content"] == REFUSAL


def test_input_and_output_are_switched_apart(tokenizer: Any, rules: Path) -> None:
    asked = Served(tokenizer, rules, BAD, output=False)
    assert asked.chat()["choices"][0]["message"]["content"] == BAD
    answered = Served(tokenizer, rules, CLEAN, input=False)
    assert answered.chat(BAD)["choices"][0]["message"]["content"] == CLEAN


async def test_a_stream_that_is_left_cancels_its_answer_and_sends_no_held_text(
    tokenizer: Any, rules: Path
) -> None:
    served = Served(tokenizer, rules, CLEAN)
    pending = served.service.begin(CHAT, chat_body(), LOCAL)
    chunks = [chunk async for chunk, _ in _first(pending.achunks(), 30)]
    pending.end()
    text = joined(chunks)[0]["text"]
    assert CLEAN.startswith(text)
    assert served.engine.generations[0].cancelled
    assert len(served.uses) == 1


async def _first(chunks: Any, number: int) -> Any:
    for index in range(number):
        yield await anext(chunks), index
    await chunks.aclose()


def test_the_log_has_direction_and_category_and_no_text(
    tokenizer: Any, rules: Path, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(tokenizer, rules, BAD)
    with caplog.at_level(logging.DEBUG):
        served.chat("pipe bomb")
        served.chat()
    assert [record.getMessage() for record in caplog.records] == [
        "content filter: input refused, category weapons",
        "content filter: output refused, category weapons",
    ]
