"""Clients against a real `gym api`: the openai client's helpers, LangChain, and what Open WebUI sends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.support.api_server import TEMPLATE_WITH_TOOLS
from tests.support.wait import SECONDS
from tests.support.warm import WarmProcess

pytestmark = pytest.mark.slow  # a server of its own, and whole answers of many requests

GYM = Path(sys.executable).parent / "gym"
OPEN_WEBUI = json.loads((Path(__file__).parent / "open_webui.json").read_text())["requests"]
BLANKS: dict[str, float] = dict.fromkeys(("9", "10", "32"), -100)
"""So small a model fills its context with blanks, where a schema allows them."""


class Booking(BaseModel):
    """Book a day."""

    day: Literal["mon", "tue"]
    people: Literal[1, 2]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("clients")
    (folder / "template.jinja").write_text(TEMPLATE_WITH_TOOLS)
    words = [GYM, "api", "--port", "0", "--json", "--set", "variants=null"]
    with (folder / "said").open("w") as said:
        process = WarmProcess(
            [*words, "--chat-template", "template.jinja"], cwd=folder, stdout=subprocess.PIPE, stderr=said
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "said").read_text()
        yield json.loads(line)["url"]
    finally:
        process.kill()


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS)


def test_parse_of_the_openai_client_returns_the_model_that_was_given(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(
        model="gym-nano",
        messages=[{"role": "user", "content": "Book."}],
        response_format=Booking,
        temperature=0,
        logit_bias=BLANKS,
    )
    found = done.choices[0].message.parsed
    assert isinstance(found, Booking)


def test_a_parsed_stream_of_the_openai_client_ends_with_the_model_that_was_given(
    client: openai.OpenAI,
) -> None:
    with client.chat.completions.stream(
        model="gym-nano",
        messages=[{"role": "user", "content": "Book."}],
        response_format=Booking,
        temperature=0,
        logit_bias=BLANKS,
    ) as stream:
        kinds = {event.type for event in stream}
        found = stream.get_final_completion().choices[0].message.parsed
    assert isinstance(found, Booking)
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_a_tool_of_pydantic_function_tool_is_called_with_its_own_arguments(client: openai.OpenAI) -> None:
    done = client.chat.completions.parse(
        model="gym-nano",
        messages=[{"role": "user", "content": "Book."}],
        tools=[openai.pydantic_function_tool(Booking, name="book")],
        tool_choice={"type": "function", "function": {"name": "book"}},
        temperature=0,
        logit_bias=BLANKS,
    )
    (call,) = done.choices[0].message.tool_calls or []
    assert call.function.name == "book"
    assert isinstance(call.function.parsed_arguments, Booking)


def test_a_held_call_streams_its_name_and_then_its_arguments(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="gym-nano",
        messages=[{"role": "user", "content": "Book."}],
        tools=[openai.pydantic_function_tool(Booking, name="book")],
        tool_choice="required",
        temperature=0,
        logit_bias=BLANKS,
    ) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    (call,) = final.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Booking)
    assert len(deltas) > 10
    assert {delta.name for delta in deltas} == {"book"}


def test_a_strict_tool_that_is_not_called_leaves_the_answer_as_it_is(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "gym-nano",
        "messages": [{"role": "user", "content": "Reverse: abc"}],
        "temperature": 0,
    }
    strict: Any = [openai.pydantic_function_tool(Booking, name="book")]
    free = [{"type": "function", "function": {**strict[0]["function"], "strict": False}}]
    (held,) = client.chat.completions.create(**asked, tools=strict).choices
    (plain,) = client.chat.completions.create(**asked, tools=free).choices
    assert held.message.content
    assert held.message.content == plain.message.content


def test_guided_output_of_vllm_s_clients(client: openai.OpenAI) -> None:
    asked: Any = {"model": "gym-nano", "messages": [{"role": "user", "content": "Reverse: abc"}]}
    for extra, pattern in (
        ({"guided_choice": ["sun", "rain"]}, "sun|rain"),
        ({"structured_outputs": {"regex": r"\d{2}-[a-c]{3}"}}, r"\d{2}-[a-c]{3}"),
        ({"guided_grammar": 'root ::= "x" [0-9] [0-9]'}, r"x\d\d"),
    ):
        (choice,) = client.chat.completions.create(**asked, extra_body=extra).choices
        assert re.fullmatch(pattern, choice.message.content or "")
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked, extra_body={"structured_outputs": {"regex": "(?=a)"}})
    assert caught.value.param == "structured_outputs.regex"


@pytest.mark.parametrize("asked", OPEN_WEBUI, ids=[asked["name"] for asked in OPEN_WEBUI])
def test_open_webui_s_requests_get_what_it_reads(url: str, asked: dict[str, Any]) -> None:
    headers = {"Authorization": "Bearer none", "Content-Type": "application/json"}
    body = {**asked["body"], "model": "gym-nano"} if "body" in asked else None
    answer = httpx.request(asked["method"], url + asked["url"], json=body, headers=headers, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    if asked["url"] == "/models":
        assert [model["id"] for model in answer.json()["data"]] == ["gym-nano"]
    elif asked["url"] == "/embeddings":
        assert [len(row["embedding"]) > 0 for row in answer.json()["data"]] == [True, True]
    elif not asked["body"]["stream"]:
        assert isinstance(answer.json()["choices"][0]["message"]["content"], str)
    else:
        assert "text/event-stream" in answer.headers["content-type"]
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert lines[-1] == "[DONE]"
        chunks = [json.loads(line) for line in lines[:-1]]
        assert chunks[-1]["usage"]["total_tokens"] > 0
        ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert ends[-1] in ("stop", "length", "tool_calls")


needs_langchain = pytest.mark.skipif(
    find_spec("langchain_openai") is None,
    reason="langchain-openai is not installed: pip install it, or run this file by an environment that has it",
)


@pytest.fixture(params=[False, True], ids=["chat completions", "responses"])
def langchain_chat(request: pytest.FixtureRequest, url: str) -> Any:
    """LangChain's chat model, over either API. Its own parameters are chat's: what Responses lacks is in the body."""
    from langchain_openai import ChatOpenAI

    biased = {"extra_body": {"logit_bias": BLANKS}} if request.param else {"logit_bias": BLANKS}
    return ChatOpenAI(
        model="gym-nano",
        base_url=url,
        api_key="none",
        temperature=0,
        max_retries=0,
        use_responses_api=request.param,
        stream_usage=True,
        **biased,
    )


@needs_langchain
def test_langchain_streams_what_it_invokes_with_its_usage(langchain_chat: Any) -> None:
    whole = langchain_chat.invoke("Reverse: abc")
    assert whole.text
    pieces = list(langchain_chat.stream("Reverse: abc"))
    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == whole.text
    used = [piece.usage_metadata for piece in pieces if piece.usage_metadata]
    assert used[-1]["total_tokens"] == whole.usage_metadata["total_tokens"] > 0


@needs_langchain
def test_langchain_binds_tools_and_sends_their_results(langchain_chat: Any) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = langchain_chat.bind_tools([Booking], tool_choice="Booking", strict=True)
    called = bound.invoke("Book.")
    (call,) = called.tool_calls
    assert Booking.model_validate(call["args"])
    streamed = None
    for piece in bound.stream("Book."):
        streamed = piece if streamed is None else streamed + piece
    assert streamed is not None
    assert [made["args"] for made in streamed.tool_calls] == [call["args"]]
    conversation = [HumanMessage("Book."), called, ToolMessage("booked", tool_call_id=call["id"])]
    assert isinstance(langchain_chat.invoke(conversation).text, str)
    free = langchain_chat.bind_tools([Booking]).invoke("Reverse: abc")
    assert isinstance(free.text, str)


@needs_langchain
def test_langchain_reads_structured_output(langchain_chat: Any) -> None:
    for method in ("json_schema", "function_calling"):
        asked = langchain_chat.with_structured_output(Booking, method=method, strict=True)
        assert isinstance(asked.invoke("Book."), Booking), method


@needs_langchain
def test_langchain_goes_on_from_a_stored_response(url: str) -> None:
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(
        model="gym-nano",
        base_url=url,
        api_key="none",
        temperature=0,
        max_retries=0,
        use_responses_api=True,
        use_previous_response_id=True,
    )
    first = chat.invoke("Reverse: abc")
    then = chat.invoke([("user", "Reverse: abc"), first, ("user", "Reverse: xyz")])
    sent = chat.invoke("Reverse: xyz", previous_response_id=first.response_metadata["id"])
    assert sent.text == then.text
    assert then.usage_metadata["input_tokens"] > first.usage_metadata["input_tokens"]


@needs_langchain
def test_langchain_embeds_texts(url: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    for dimensions in (None, 4):
        vectors = OpenAIEmbeddings(
            model="gym-nano",
            base_url=url,
            api_key="none",
            check_embedding_ctx_length=False,
            dimensions=dimensions,
        ).embed_documents(["a", "b"])
        assert len(vectors) == 2
        assert vectors[0] != vectors[1]
        assert dimensions is None or len(vectors[0]) == dimensions


def test_the_openai_client_s_responses_are_parsed_streamed_and_gone_on_from(client: openai.OpenAI) -> None:
    greedy: Any = {"model": "gym-nano", "temperature": 0, "extra_body": {"logit_bias": BLANKS}}
    done = client.responses.parse(**greedy, input="Book.", text_format=Booking)
    assert isinstance(done.output_parsed, Booking)
    with client.responses.stream(**greedy, input="Book.", text_format=Booking) as stream:
        assert stream.get_final_response().output_parsed == done.output_parsed
    tools: Any = [openai.pydantic_function_tool(Booking, name="book")]
    called = client.responses.parse(**greedy, input="Book.", tools=tools, tool_choice="required")
    (call,) = called.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Booking)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "booked"}
    then = client.responses.create(**greedy, input=[result], previous_response_id=called.id)
    assert client.responses.retrieve(then.id).output_text == then.output_text
