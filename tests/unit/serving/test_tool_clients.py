"""The openai client's helpers with strict tools and `tool_choice: auto`, over HTTP, for each tool format."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal, cast

import openai
import pytest
from pydantic import BaseModel

from gym_fed.serving.setup import Serving
from tests.support.api_server import api_server
from tests.support.quick import quick
from tests.support.tool_templates import source_of
from tests.support.wait import SECONDS
from tests.support.wishing import Wishing, served, tokenizer_with

ASK: Any = [{"role": "user", "content": "Book."}]
OFF = '{"day": "sun", "people": 1}'
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
FAMILIES = {
    "qwen3": ("So.\n", f'<tool_call>\n{{"name": "book", "arguments": {OFF}}}\n</tool_call>'),
    "qwen3_6": (
        "So.\n",
        "<tool_call>\n<function=book>\n<parameter=day>\nsun\n</parameter>\n<parameter=people>\n1\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "llama3_1": ("", f'{{"name": "book", "parameters": {OFF}}}'),
    "mistral": ("So.", f'[TOOL_CALLS] [{{"name": "book", "arguments": {OFF}}}]'),
    "mistral_v11": ("So.", f"[TOOL_CALLS]book[ARGS]{OFF}"),
    "plain": ("So.\n", f'<tool_call>\n{{"name": "book", "arguments": {OFF}}}\n</tool_call>'),
}
"""What stands before a call, and a call that its schema forbids by one word of three letters."""


class Booking(BaseModel):
    """Book a day."""

    day: Literal["mon", "tue"]
    people: int


@contextmanager
def client_of(family: str, model: Wishing) -> Iterator[openai.OpenAI]:
    template = PLAIN if family == "plain" else source_of(family)
    tokenizer = tokenizer_with(template)
    text = "".join(FAMILIES[family])
    model.wish = tokenizer.encode(text, add_special_tokens=False)
    with served(model, tokenizer) as service:
        serving = SimpleNamespace(
            service=service, engine=service._engine, store=None, usage_log=None, content_filter=None
        )
        with api_server(cast("Serving", serving), None) as server:
            yield openai.OpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=SECONDS)


@pytest.mark.parametrize("family", quick(FAMILIES, "qwen3", "qwen3_6", "mistral"))
def test_a_pydantic_function_tool_is_held_to_its_model_whole_and_streamed(family: str) -> None:
    tools = [openai.pydantic_function_tool(Booking, name="book")]
    asked: Any = {"model": "toy", "messages": ASK, "tools": tools, "max_tokens": 300, "temperature": 0}
    with client_of(family, Wishing()) as client:
        for choice in ("auto", openai.omit):
            done = client.chat.completions.parse(**asked, tool_choice=choice)
            assert done.choices[0].finish_reason == "tool_calls"
            (call,) = done.choices[0].message.tool_calls or []
            booking = call.function.parsed_arguments
            assert isinstance(booking, Booking)
            assert (done.choices[0].message.content or "") == FAMILIES[family][0].strip()
        with client.chat.completions.stream(**asked) as stream:
            deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
            final = stream.get_final_completion()
        (streamed,) = final.choices[0].message.tool_calls or []
        assert streamed.function.parsed_arguments == booking
        assert deltas[0].name == "book"
        assert family == "qwen3_6" or len(deltas) > 10


@pytest.mark.parametrize("family", quick(FAMILIES, "qwen3", "qwen3_6", "mistral"))
def test_a_call_and_its_result_go_back_into_the_conversation(family: str) -> None:
    tool: Any = {"type": "function", "function": {"name": "book", "parameters": {"type": "object"}}}
    model = Wishing()
    with client_of(family, model) as client:
        first = client.chat.completions.create(model="toy", messages=ASK, tools=[tool], max_tokens=300)
        message = first.choices[0].message
        (call,) = message.tool_calls or []
        assert call.type == "function"
        assert json.loads(call.function.arguments)["day"] == "sun"
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        model.wish = list(b"It is booked.")
        history = [*ASK, message.model_dump(exclude_none=True), result]
        second = client.chat.completions.create(model="toy", messages=history, tools=[tool], max_tokens=300)
        assert second.choices[0].message.content == "It is booked."
        assert second.choices[0].finish_reason == "stop"
