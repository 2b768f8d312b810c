"""The openai client's own `responses` against the real engine on gym-nano, over HTTP on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from gym_fed.config.serving import ServingConfig
from gym_fed.serving.http.keys import KeyFile
from gym_fed.serving.setup import open_serving
from tests.support.api_server import TEMPLATE_WITH_TOOLS, api_server
from tests.support.wait import SECONDS

ASK = "Reverse: abc"
GREEDY: dict[str, Any] = {"model": "gym-nano", "temperature": 0}
NO_BLANKS = {"logit_bias": dict.fromkeys(("9", "10", "32"), -100)}
"""So small a model fills its context with blanks, where a schema allows them."""


class Booking(BaseModel):
    """Book a day."""

    day: Literal["mon", "tue"]
    people: Literal[1, 2]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("responses")
    keys = KeyFile(folder / "keys.json")
    texts = {name: keys.add(name) for name in ("ann", "bob")}
    config = ServingConfig(chat_template=TEMPLATE_WITH_TOOLS, usage_log=folder / "usage.jsonl", device="cpu")
    with open_serving(config) as serving, api_server(serving, keys) as running:
        yield SimpleNamespace(**vars(running), keys=texts, usage=folder / "usage.jsonl")


def client_of(server: Any, who: str = "ann") -> openai.OpenAI:
    key = server.keys[who]
    return openai.OpenAI(
        base_url=server.url, api_key=key, max_retries=0, timeout=SECONDS, http_client=server.http
    )


@pytest.fixture
def client(server: Any) -> openai.OpenAI:
    return client_of(server)


def test_a_response_says_what_a_chat_does_whole_and_streamed(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(**GREEDY, messages=[{"role": "user", "content": ASK}])
    whole = client.responses.create(**GREEDY, input=ASK)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage is not None
    assert chat.usage is not None
    assert whole.usage.input_tokens == chat.usage.prompt_tokens
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    with client.responses.stream(**GREEDY, input=ASK) as stream:
        said = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert said == stream.get_final_response().output_text == whole.output_text


def test_the_raw_stream_has_named_events_and_no_done(server: Any) -> None:
    headers = {"authorization": f"Bearer {server.keys['ann']}"}
    body = {**GREEDY, "input": ASK, "stream": True}
    found = server.http.post(f"{server.url}/responses", json=body, headers=headers)
    assert found.headers["content-type"].startswith("text/event-stream")
    events = [part.split("\n") for part in found.text.strip().split("\n\n")]
    for number, (name, data) in enumerate(events):
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number


def test_parse_returns_the_model_that_was_given(client: openai.OpenAI) -> None:
    done = client.responses.parse(**GREEDY, input="Book.", text_format=Booking, extra_body=NO_BLANKS)
    assert isinstance(done.output_parsed, Booking)
    with client.responses.stream(
        **GREEDY, input="Book.", text_format=Booking, extra_body=NO_BLANKS
    ) as stream:
        assert stream.get_final_response().output_parsed == done.output_parsed


def test_a_pydantic_tool_is_called_and_its_result_goes_back(client: openai.OpenAI) -> None:
    tools: Any = [openai.pydantic_function_tool(Booking, name="book")]
    done = client.responses.parse(
        **GREEDY, input="Book.", tools=tools, tool_choice="required", extra_body=NO_BLANKS
    )
    (call,) = done.output
    assert call.type == "function_call"
    assert isinstance(call.parsed_arguments, Booking)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "booked"}
    then = client.responses.create(**GREEDY, input=[result], previous_response_id=done.id)
    assert then.status == "completed"
    by_hand: Any = [{"role": "user", "content": "Book."}, call.to_dict(), result]
    by_hand[1].pop("parsed_arguments")
    assert client.responses.create(**GREEDY, input=by_hand).output_text == then.output_text
    kinds = [
        event.type
        for event in client.responses.create(
            **GREEDY,
            input="Book.",
            tools=[
                {
                    "type": "function",
                    "name": "book",
                    "parameters": Booking.model_json_schema(),
                    "strict": True,
                }
            ],
            tool_choice="required",
            extra_body=NO_BLANKS,
            stream=True,
        )
    ]
    assert kinds[2] == "response.output_item.added"
    assert kinds.count("response.function_call_arguments.done") == 1
    assert "response.function_call_arguments.delta" in kinds


def test_a_stored_response_is_read_deleted_and_gone_on_from_by_its_key_alone(server: Any) -> None:
    ann, bob = client_of(server), client_of(server, "bob")
    made = ann.responses.create(**GREEDY, input=ASK, metadata={"trip": "1"})
    assert ann.responses.retrieve(made.id) == made
    for act in (bob.responses.retrieve, bob.responses.delete):
        with pytest.raises(openai.NotFoundError):
            act(made.id)
    with pytest.raises(openai.BadRequestError) as caught:
        bob.responses.create(**GREEDY, input="x", previous_response_id=made.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
    then = ann.responses.create(**GREEDY, input="And?", previous_response_id=made.id)
    assert then.usage is not None
    assert made.usage is not None
    assert then.usage.input_tokens > made.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        ann.responses.retrieve(made.id, include=["message.output_text.logprobs"])
    ann.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        ann.responses.retrieve(made.id)
    lines = [json.loads(line) for line in Path(server.usage).read_text().splitlines()]
    assert {"trip": "1"} in [line.get("metadata") for line in lines]
    assert "/v1/responses" in {line["url"] for line in lines}


def test_the_input_items_of_a_stored_response_are_listed_in_pages_for_its_key(server: Any) -> None:
    ann, bob = client_of(server), client_of(server, "bob")
    first = ann.responses.create(**GREEDY, input=ASK)
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
    items: Any = [{"role": "user", "content": "And?"}, call, output]
    second = ann.responses.create(**GREEDY, input=items, previous_response_id=first.id)
    listed = list(ann.responses.input_items.list(second.id, limit=2, order="asc"))
    assert [item.type for item in listed] == [
        "message",
        "message",
        "message",
        "function_call",
        "function_call_output",
    ]
    shown = [item.model_dump() for item in listed]
    assert (shown[0]["content"][0]["type"], shown[0]["content"][0]["text"]) == ("input_text", ASK)
    assert [one["role"] for one in shown[:3]] == ["user", "assistant", "user"]
    assert shown[1]["content"][0]["text"] == first.output_text
    assert (shown[3]["name"], shown[4]["output"]) == ("f", "rain")
    newest_first = list(ann.responses.input_items.list(second.id))
    assert [item.id for item in newest_first] == [item.id for item in reversed(listed)]  # type: ignore[union-attr]
    with pytest.raises(openai.NotFoundError):
        bob.responses.input_items.list(second.id)
    for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "x"}):
        with pytest.raises(openai.BadRequestError) as caught:
            ann.responses.input_items.list(second.id, **wrong)  # type: ignore[arg-type]
        assert caught.value.param == next(iter(wrong))


def test_a_stored_chat_is_read_and_deleted(server: Any) -> None:
    ann, bob = client_of(server), client_of(server, "bob")
    made = ann.chat.completions.create(
        **GREEDY, messages=[{"role": "user", "content": ASK}], store=True, metadata={"trip": "2"}
    )
    assert ann.chat.completions.retrieve(made.id) == made
    with pytest.raises(openai.NotFoundError):
        bob.chat.completions.retrieve(made.id)
    assert ann.chat.completions.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        ann.chat.completions.retrieve(made.id)


def test_the_second_time_a_prompt_is_cached_and_usage_says_how_much(client: openai.OpenAI) -> None:
    long = "Reverse: " + "abc" * 30

    def cached(**more: Any) -> int:
        usage = client.responses.create(**GREEDY, input=long, max_output_tokens=1, **more).usage
        assert usage is not None
        return usage.input_tokens_details.cached_tokens

    assert cached() == 0
    first = cached()
    assert first > 0
    assert first % 16 == 0
    chat = client.chat.completions.create(
        **GREEDY, messages=[{"role": "user", "content": long}], max_tokens=1, n=2
    )
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == first
