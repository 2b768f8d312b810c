"""Logprobs that are those of the answer's text: bytes, offsets, stop texts, parts of characters, in every API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import CompletionChoice

from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.service import COMPLETIONS, OpenAIService
from tests.support.tool_templates import source_of
from tests.support.wishing import Wishing, openai_client, served, tokenizer_with

ASK: Any = [{"role": "user", "content": "Book."}]
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = [65, 261]
"""Token ids after which ``Wishing`` begins its answer."""
INCLUDE: Any = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def model() -> Wishing:
    return Wishing()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(PLAIN, "<|mark|>")


@pytest.fixture(scope="module")
def service(model: Wishing, tokenizer: Any) -> Iterator[OpenAIService]:
    with served(model, tokenizer) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: OpenAIService) -> Iterator[openai.OpenAI]:
    with openai_client(service) as client:
        yield client


def completion(client: openai.OpenAI, **more: Any) -> CompletionChoice:
    asked: Any = {"model": "toy", "prompt": PROMPT, "max_tokens": 60, "temperature": 0, "logprobs": 2, **more}
    (choice,) = client.completions.create(**asked).choices
    return choice


def chat(client: openai.OpenAI, **more: Any) -> Any:
    asked: Any = {
        "model": "toy",
        "messages": ASK,
        "max_tokens": 300,
        "temperature": 0,
        "logprobs": True,
        **more,
    }
    (choice,) = client.chat.completions.create(**asked).choices
    return choice


def joined(tokens: Any) -> str:
    return b"".join(bytes(token.bytes) for token in tokens).decode()


def test_offsets_count_characters_and_parts_of_one_have_their_bytes(client: Any, model: Wishing) -> None:
    model.wish = list("a🙂é!".encode())
    choice = completion(client)
    assert choice.text == "a🙂é!"
    assert choice.logprobs.text_offset == [0, 1, 1, 1, 1, 2, 2, 3]
    assert choice.logprobs.tokens[:3] == ["a", r"bytes:\xf0", r"bytes:\x9f"]
    content = chat(client, top_logprobs=2).logprobs.content
    assert [(token.token, token.bytes) for token in content[:2]] == [("a", [97]), (r"\xf0", [240])]
    assert joined(content) == "a🙂é!"
    assert all(other.bytes is not None for token in content for other in token.top_logprobs)


def test_likeliest_tokens_that_print_alike_are_all_reported(client: Any, model: Wishing) -> None:
    model.wish = [0xFF, 97]
    tops = completion(client, logprobs=5).logprobs.top_logprobs
    assert [len(top) for top in tops] == [5, 5]
    assert {key.partition("x")[0] for key in tops[0]} >= {"bytes:\\"}


def test_tokens_of_the_same_bytes_have_keys_of_their_own() -> None:
    from gym_fed.serving.engine.request import TokenLogprob
    from gym_fed.serving.openai.logprobs import logprobs_of_completion

    token = TokenLogprob(1, b"a", -0.5, ((1, b"a", -0.5), (7, b"a", -1.0), (8, b"b", -2.0)))
    assert logprobs_of_completion([token])["top_logprobs"] == [{"a": -0.5, "token_id:7": -1.0, "b": -2.0}]
    sampled = TokenLogprob(9, b"a", -3.0, token.top)
    expected = {"token_id:1": -0.5, "token_id:7": -1.0, "b": -2.0, "a": -3.0}
    assert logprobs_of_completion([sampled])["top_logprobs"] == [expected]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_sampled_token_is_among_the_likeliest_of_a_completion(
    client: Any, model: Wishing, count: int
) -> None:
    model.wish = list(b"abcdef")
    choice = completion(client, logprobs=count, logit_bias={"122": 100}, max_tokens=5)
    tokens, values = choice.logprobs.tokens, choice.logprobs.token_logprobs
    assert tokens == ["z"] * 5
    for token, value, top in zip(tokens, values, choice.logprobs.top_logprobs, strict=True):
        assert top[token] == value
        assert count <= len(top) <= count + 1


@pytest.mark.parametrize("stop", ["END", "🙂", "w🙂", "\n"])
def test_tokens_of_a_removed_stop_text_are_not_reported(client: Any, model: Wishing, stop: str) -> None:
    model.wish = list("one EN tw🙂 three\nEND four".encode())
    text = "one EN tw🙂 three\nEND four".partition(stop)[0]
    choice = completion(client, stop=stop)
    assert (choice.text, choice.finish_reason) == (text, "stop")
    assert "".join(bytes_of(token) for token in choice.logprobs.tokens).encode("latin-1").decode() == text
    content = chat(client, stop=stop)
    assert content.message.content == joined(content.logprobs.content) == text
    response = client.responses.create(
        model="toy", input="Book.", include=INCLUDE, extra_body={"stop": [stop]}
    )
    assert response.output_text == joined(response.output[0].content[0].logprobs) == text


def bytes_of(token: str) -> str:
    """The bytes of a token of completions, as Latin-1."""
    if token.startswith("bytes:"):
        return token.removeprefix("bytes:").encode().decode("unicode_escape")
    return token.encode().decode("latin-1")


def test_an_answer_that_ends_within_a_character_ends_before_it(client: Any, model: Wishing) -> None:
    model.wish = list("ab🙂".encode())
    for end in (2, 3, 4, 5):
        choice, of_chat = completion(client, max_tokens=end), chat(client, max_tokens=end)
        assert (choice.text, choice.finish_reason) == ("ab", "length")
        assert of_chat.message.content == joined(of_chat.logprobs.content) == "ab"
        assert choice.logprobs.tokens == ["a", "b"]
    model.wish = [*b"ab", 0xF0, 0x9F, *b"c"]
    assert completion(client).text == chat(client).message.content == "ab\ufffdc"
    assert completion(client).logprobs.text_offset == [0, 1, 2, 2, 3]


def test_chat_and_responses_report_the_same_tokens_whole_and_streamed(client: Any, model: Wishing) -> None:
    model.wish = list("  Zoë 🙂 said.\n".encode())
    expected = [token.to_dict() for token in chat(client, top_logprobs=2).logprobs.content]
    asked: Any = {"model": "toy", "input": "Book.", "include": INCLUDE, "top_logprobs": 2, "temperature": 0}
    part = client.responses.create(**asked).output[0].content[0]
    assert part.text == "  Zoë 🙂 said.\n"
    assert [token.to_dict() for token in part.logprobs] == expected
    streamed: list[Any] = []
    for event in client.responses.create(**asked, stream=True):
        if event.type == "response.output_text.delta":
            streamed += [token.to_dict() for token in event.logprobs]
    assert streamed == expected
    chunks = client.chat.completions.create(
        model="toy", messages=ASK, temperature=0, logprobs=True, top_logprobs=2, stream=True
    )
    content = [
        token.to_dict() for c in chunks if c.choices[0].logprobs for token in c.choices[0].logprobs.content
    ]
    assert content == expected


@pytest.mark.parametrize("strict", [False, True])
def test_tokens_of_calls_are_not_those_of_text(strict: bool) -> None:
    tool: Any = {
        "type": "function",
        "function": {"name": "book", "parameters": {"type": "object"}, "strict": strict},
    }
    model, tokenizer = Wishing(), tokenizer_with(source_of("qwen3"))
    call = '<tool_call>\n{"name": "book", "arguments": {}}\n</tool_call>'
    model.wish = tokenizer.encode(f"So 🙂.\n{call}", add_special_tokens=False)
    with served(model, tokenizer) as service:
        body = {"model": "toy", "messages": ASK, "tools": [tool], "temperature": 0, "logprobs": True}
        whole = service.handle("/v1/chat/completions", body, LOCAL)["choices"][0]
        chunks = list(service.stream("/v1/chat/completions", body, LOCAL))
        of_responses = {
            "model": "toy",
            "input": "Book.",
            "tools": [{"type": "function", **tool["function"]}],
            "include": INCLUDE,
        }
        items = service.handle("/v1/responses", of_responses, LOCAL)["output"]
    assert whole["message"]["tool_calls"][0]["function"]["name"] == "book"
    streamed = [
        token for c in chunks for token in (c["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    for found in (whole["logprobs"]["content"], streamed, items[0]["content"][0]["logprobs"]):
        assert b"".join(bytes(token["bytes"]) for token in found).decode() == "So 🙂.\n"


@given(st.data())
@settings(max_examples=120, deadline=None)
def test_joined_bytes_are_the_text_sent(service: OpenAIService, model: Wishing, data: Any) -> None:
    letters = st.sampled_from([*b"ab\n", 0xF0, 0x9F, 0x99, 0x82, 0xC3, 0xA9, 0xFF, 0xED, 259, 260, 262])
    model.wish = data.draw(st.lists(letters | st.integers(0, 257), max_size=20))
    stop = data.draw(st.lists(st.text("ab\n🙂é\ufffd", min_size=1, max_size=3), max_size=3))
    body: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "logprobs": 5, "temperature": 0}
    body |= {"max_tokens": data.draw(st.integers(1, 24)), "stop": stop or None}
    body["skip_special_tokens"] = data.draw(st.booleans())
    (whole,) = service.handle(COMPLETIONS, body, LOCAL)["choices"]
    chunks = [chunk["choices"][0] for chunk in service.stream(COMPLETIONS, body, LOCAL)]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    logprobs = whole["logprobs"]
    for name, values in logprobs.items():
        assert [value for chunk in chunks for value in (chunk["logprobs"] or {}).get(name, ())] == values
    assert not any(one in whole["text"] for one in stop)
    text, pieces = whole["text"], [bytes_of(token).encode("latin-1") for token in logprobs["tokens"]]
    decoded = b"".join(pieces).decode(errors="replace")
    assert decoded.startswith(text)
    assert len(decoded) - len(text) <= max(map(len, pieces), default=0)
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    for place, offset in enumerate(offsets):
        assert offset == len(b"".join([*pieces[:place], pieces[place][:1]]).decode(errors="replace")) - 1
        assert offset < len(text)
    assert all(len(top) in (5, 6) for top in logprobs["top_logprobs"])
