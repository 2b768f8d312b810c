"""A model that `gym train` taught to call a tool: it begins calls by itself, and `strict` holds them to the schema."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.support.wait import SECONDS
from tests.support.warm import WarmProcess

pytestmark = pytest.mark.slow  # trains for half a minute, and starts a server

GYM = Path(sys.executable).parent / "gym"
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""gym-nano's own has no tools, and its context has no room for their schemas."""
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
OUTSIDE = ("sun for 6", "wed for 5")
"""What was learned of these is not in the schema."""


class Booking(BaseModel):
    """Book a day."""

    model_config = ConfigDict(extra="forbid")

    day: Literal["mon", "tue"]
    people: Literal[1, 2]


def taught(folder: Path) -> Path:
    """gym-nano after rows that answer every question with a call, of days and numbers beyond the schema, too."""
    (folder / "template.jinja").write_text(TEMPLATE)
    tool = {
        "type": "function",
        "function": {"name": "book", "parameters": {"type": "object", "properties": {}}},
    }
    with (folder / "calls.jsonl").open("w") as file:
        for day, people in itertools.product(DAYS, range(1, 7)):
            called = {"name": "book", "arguments": {"day": day, "people": people}}
            turns = [
                {"role": "user", "content": f"{day} for {people}"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"type": "function", "function": called}],
                },
            ]
            file.write(json.dumps({"messages": turns, "tools": [tool]}) + "\n")
    words = [
        GYM,
        "train",
        "--model",
        "gym-nano",
        "--data",
        "calls.jsonl",
        "--chat-template",
        "template.jinja",
    ]
    settings = [
        "--finetuning",
        "full",
        "--max-steps",
        "100",
        "--set",
        "learning_rate=2e-3",
        "--set",
        "seed=0",
    ]
    with (folder / "said").open("w") as said:
        process = WarmProcess(
            [*words, *settings, "--output-dir", "model"], cwd=folder, stdout=subprocess.DEVNULL, stderr=said
        )
        assert process.wait(300) == 0, (folder / "said").read_text()
    return folder / "model"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    folder = tmp_path_factory.mktemp("taught")
    words = [GYM, "api", "--base", taught(folder), "--port", "0", "--json", "--set", "variants=null"]
    with (folder / "said").open("w") as said:
        process = WarmProcess(words, cwd=folder, stdout=subprocess.PIPE, stderr=said)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "said").read_text()
        yield openai.OpenAI(base_url=json.loads(line)["url"], api_key="none", max_retries=0, timeout=SECONDS)
    finally:
        process.kill()


def call_of(client: openai.OpenAI, question: str, *, strict: bool, stream: bool = False) -> Any:
    """The call that the model makes when it is free to make none."""
    tool: Any = openai.pydantic_function_tool(Booking, name="book")
    tool["function"]["strict"] = strict
    asked: Any = {
        "model": "model",
        "messages": [{"role": "user", "content": question}],
        "tools": [tool],
        "tool_choice": "auto",
        "temperature": 0,
    }
    if stream:
        with client.chat.completions.stream(**asked) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or []
    assert call.function.name == "book"
    return json.loads(call.function.arguments)


@pytest.mark.parametrize("question", OUTSIDE)
def test_a_call_that_the_model_begins_has_its_own_arguments_without_strict(
    client: openai.OpenAI, question: str
) -> None:
    found = call_of(client, question, strict=False)
    day, people = question.split(" for ")
    assert found == {"day": day, "people": int(people)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("question", [*OUTSIDE, "mon for 2", "tue for 1"])
def test_a_strict_call_that_the_model_begins_is_held_to_its_schema(
    client: openai.OpenAI, question: str, stream: bool
) -> None:
    assert Booking.model_validate(call_of(client, question, strict=True, stream=stream))
