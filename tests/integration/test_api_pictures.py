"""Pictures through a real `gym api`, asked by the openai client as its users ask."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from gym_fed.base.models import load_tokenizer
from tests.support.vision_models import data_url, drawn, expected, image_part, vision_model
from tests.support.wait import SECONDS
from tests.support.warm import WarmProcess

pytestmark = pytest.mark.slow  # a server of its own

GYM = Path(sys.executable).parent / "gym"
PICTURE = drawn(3, 48, 32)
ROWS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]
TOKENS = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision_model("llava", tmp_path_factory.mktemp("pictures") / "tiny-llava")


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[openai.OpenAI]:
    with (folder.parent / "said").open("w") as said:
        process = WarmProcess(
            [GYM, "api", "--base", folder.name, "--port", "0", "--json"],
            cwd=folder.parent,
            stdout=subprocess.PIPE,
            stderr=said,
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder.parent / "said").read_text()
        url = json.loads(line)["url"]
        yield openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def wanted(folder: Path) -> tuple[int, str]:
    """Tokens of the prompt, and the answer's text, without half a character at its end."""
    ids, answer = expected(folder, ROWS, [PICTURE], TOKENS)
    return len(ids), load_tokenizer(str(folder)).decode(answer, skip_special_tokens=True).rstrip("\ufffd")


def asked(url: str) -> Any:
    return [
        {"role": "user", "content": [image_part(url, detail="auto"), {"type": "text", "text": "What is it?"}]}
    ]


def test_chat_answers_as_transformers_does(client: openai.OpenAI, wanted: tuple[int, str]) -> None:
    how: Any = {"model": "tiny-llava", "messages": asked(data_url(PICTURE)), "temperature": 0}
    whole = client.chat.completions.create(**how, max_tokens=TOKENS)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.choices[0].message.content) == wanted
    stream = client.chat.completions.create(**how, max_tokens=TOKENS, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == wanted[1]


def test_responses_answer_as_chat_does(client: openai.OpenAI, wanted: tuple[int, str]) -> None:
    content: Any = [
        {"type": "input_image", "image_url": data_url(PICTURE), "detail": "auto"},
        {"type": "input_text", "text": "What is it?"},
    ]
    made = client.responses.create(
        model="tiny-llava",
        input=[{"role": "user", "content": content}],
        temperature=0,
        max_output_tokens=TOKENS,
    )
    assert made.usage is not None
    assert (made.usage.input_tokens, made.output_text) == wanted


def test_a_web_address_is_refused_with_what_to_send(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="does not download media") as caught:
        client.chat.completions.create(model="tiny-llava", messages=asked("https://example.org/a.png"))
    assert caught.value.param == "messages[0].content[0].image_url"
    assert "base64" in caught.value.message


def test_the_list_of_models_says_that_pictures_are_read(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.model_dump()["input_modalities"] == ["text", "image"]
