"""Stop texts that are control tokens, control tokens in the text, and answers that continue a message, as in vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.service import CHAT, OpenAIService
from tests.support.wishing import Wishing, openai_client, served, tokenizer_with

ASK: Any = [{"role": "user", "content": "Book."}]
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = [65, 261]
MARK = "<|mark|>"


@pytest.fixture(scope="module")
def model() -> Wishing:
    return Wishing()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_with(PLAIN, MARK)


@pytest.fixture(scope="module")
def service(model: Wishing, tokenizer: Any) -> Iterator[OpenAIService]:
    with served(model, tokenizer) as service:
        yield service


@pytest.fixture(scope="module")
def client(service: OpenAIService) -> Iterator[openai.OpenAI]:
    with openai_client(service) as client:
        yield client


def answers(client: openai.OpenAI, **extra: Any) -> list[tuple[str | None, str]]:
    """The text and the reason for the end, of each API."""
    asked: Any = {"model": "toy", "temperature": 0, "extra_body": extra}
    of_chat = client.chat.completions.create(messages=ASK, **asked).choices[0]
    of_text = client.completions.create(prompt=PROMPT, max_tokens=90, **asked).choices[0]
    response = client.responses.create(input="Book.", **asked)
    return [
        (of_chat.message.content, of_chat.finish_reason),
        (of_text.text, of_text.finish_reason),
        (response.output_text, "stop" if response.status == "completed" else "length"),
    ]


@pytest.mark.parametrize("stop", [MARK, f"two{MARK}", f"{MARK}\nthree", f"o{MARK}\nt"])
def test_a_stop_text_that_has_a_control_token_stops(
    client: Any, model: Wishing, tokenizer: Any, stop: str
) -> None:
    text = f"one two{MARK}\nthree"
    model.wish = tokenizer.encode(text, add_special_tokens=False)
    shown = text.partition(stop)[0].replace(MARK, "")
    assert answers(client, stop=[stop]) == [(shown, "stop")] * 3
    assert answers(client, stop=[f"{MARK}x"]) == [("one two\nthree", "stop")] * 3


def test_a_control_token_stops_also_though_end_tokens_are_ignored(client: Any, model: Wishing) -> None:
    model.wish = list(b"one")
    end = "<|im_end|>"
    assert answers(client, stop=[end], ignore_eos=True) == [("one", "stop")] * 3


def test_a_stop_text_may_end_with_the_end_token(client: Any, model: Wishing) -> None:
    model.wish = list(b"one\n")
    assert answers(client) == [("one\n", "stop")] * 3
    assert answers(client, stop=["\n<|im_end|>"]) == [("one", "stop")] * 3


def test_control_tokens_are_in_the_text_on_request(client: Any, model: Wishing, tokenizer: Any) -> None:
    model.wish = tokenizer.encode(f"one{MARK}two", add_special_tokens=False)
    assert answers(client, skip_special_tokens=False) == [(f"one{MARK}two", "stop")] * 3
    assert answers(client, skip_special_tokens=True) == answers(client) == [("onetwo", "stop")] * 3
    logprobs = (
        client.completions.create(
            model="toy", prompt=PROMPT, logprobs=0, temperature=0, extra_body={"skip_special_tokens": False}
        )
        .choices[0]
        .logprobs
    )
    assert "".join(logprobs.tokens) == f"one{MARK}two"


def test_batches_stop_alike(service: OpenAIService, model: Wishing, tokenizer: Any) -> None:
    model.wish = tokenizer.encode(f"one{MARK}two", add_special_tokens=False)
    body = {"model": "toy", "messages": ASK, "stop": MARK, "temperature": 0}
    assert service.handle(CHAT, body, LOCAL)["choices"][0]["message"]["content"] == "one"


def prompt_of(client: openai.OpenAI, messages: Any, **extra: Any) -> str:
    """The text that the server makes of messages."""
    root = str(client.base_url).removesuffix("/v1/")
    ids = client.post(f"{root}/tokenize", body={"messages": messages, **extra}, cast_to=object)["tokens"]  # type: ignore[index]
    return client.post(f"{root}/detokenize", body={"tokens": ids}, cast_to=object)["prompt"]  # type: ignore[index]


BEGUN: Any = [*ASK, {"role": "assistant", "content": "Sure: "}]
OPEN = {"continue_final_message": True, "add_generation_prompt": False}


def test_prompts_end_as_in_vllm(client: Any, tokenizer: Any) -> None:
    ask = "<|im_start|>user\nBook.<|im_end|>\n"
    begin = "<|im_start|>assistant\n"
    assert prompt_of(client, ASK) == ask + begin
    assert prompt_of(client, ASK, add_generation_prompt=False) == ask
    closed = f"{ask}{begin}Sure: <|im_end|>\n"
    assert prompt_of(client, BEGUN) == closed + begin
    assert prompt_of(client, BEGUN, add_generation_prompt=False) == closed
    for given in (OPEN, {"continue_final_message": True}):
        assert prompt_of(client, BEGUN, **given) == f"{ask}{begin}Sure: "
    theirs = tokenizer.apply_chat_template(BEGUN, tokenize=False, continue_final_message=True)
    assert prompt_of(client, BEGUN, **OPEN) == theirs


def test_a_chat_continues_the_last_message(client: Any, model: Wishing, service: OpenAIService) -> None:
    submitted = []
    submit = service._engine.submit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(service._engine, "submit", lambda request: submitted.append(request) or submit(request))
        asked: Any = {"model": "toy", "messages": BEGUN, "temperature": 0, "extra_body": OPEN}
        model.wish = [*b"Sure: ", *b"room 7."]
        (choice,) = client.chat.completions.create(**asked).choices
        streamed = client.chat.completions.create(**asked, stream=True)
        assert choice.message.content == "room 7."
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == "room 7."
    assert bytes(submitted[0].prompt_ids[-6:]) == b"Sure: "


def test_both_ends_at_once_are_refused(client: Any) -> None:
    both = {"continue_final_message": True, "add_generation_prompt": True}
    with pytest.raises(openai.BadRequestError, match="cannot both be true") as caught:
        client.chat.completions.create(model="toy", messages=BEGUN, extra_body=both)
    assert caught.value.param == "continue_final_message"
    empty: Any = [*ASK, {"role": "assistant", "content": "", "tool_calls": None}]
    model_text = client.chat.completions.create(
        model="toy", messages=empty, max_tokens=1, extra_body={"continue_final_message": True}
    )
    assert model_text.choices


@pytest.mark.parametrize(
    ("begun", "parts"),
    [
        ("Sure: ", ("", "Hm.</think>So.")),
        ("<think>Well, ", ("Hm.", "So.")),
        ("<think>a</think>b", ("", "Hm.</think>So.")),
    ],
)
def test_an_answer_thinks_only_if_the_message_has_an_open_thought(begun: str, parts: tuple[str, str]) -> None:
    model, tokenizer = Wishing(), tokenizer_with(PLAIN)
    model.wish = list(f"{begun}Hm.</think>So.".encode())
    messages = [*ASK, {"role": "assistant", "content": begun}]
    with served(model, tokenizer, reasoning_parser="deepseek_r1") as service:
        body = {"model": "toy", "messages": messages, "temperature": 0, **OPEN}
        message = service.handle(CHAT, body, LOCAL)["choices"][0]["message"]
    assert (message.get("reasoning_content", ""), message["content"]) == parts


@pytest.mark.parametrize("field", ["thinking_token_budget", "thinking_budget", "continue_final_message"])
def test_completions_name_where_fields_of_chats_work(client: Any, field: str) -> None:
    with pytest.raises(openai.BadRequestError, match="/v1/chat/completions") as caught:
        client.completions.create(model="toy", prompt="a", extra_body={field: 5})
    assert caught.value.param == field
