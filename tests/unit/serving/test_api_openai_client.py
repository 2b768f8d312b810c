"""The real openai client against the real engine on gym-nano, over HTTP on loopback."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from gym_fed.config.serving import ServingConfig
from gym_fed.serving.http.app import create_app
from gym_fed.serving.http.gateway import Gateway
from gym_fed.serving.http.keys import Gate, KeyFile
from gym_fed.serving.openai.catalogue import LOCAL, Catalogue
from gym_fed.serving.openai.service import CHAT, OpenAIService
from gym_fed.serving.setup import Serving, open_serving
from tests.support.nano_store import nano_store
from tests.support.wait import SECONDS

ASK: list[Any] = [{"role": "user", "content": "Reverse: abc"}]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("store")
    nano_store(folder, ["ann", "bob"])
    config = ServingConfig(variants=folder, usage_log=folder / "usage.jsonl", device="cpu")
    with open_serving(config) as serving:
        yield serving


@pytest.fixture(scope="module")
def server(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The address, and keys of ann, bob and everyone."""
    keys = KeyFile(tmp_path_factory.mktemp("keys") / "keys.json")
    texts = {name: keys.add(name, variants=(name,)) for name in ("ann", "bob")}
    texts["all"] = keys.add("all", everything=True)
    gateway = Gateway(Gate(keys), request_timeout_seconds=60)
    gateway.serving = serving
    config = uvicorn.Config(create_app(gateway), port=0, lifespan="off", log_config=None, log_level="error")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run)
    thread.start()
    while not running.started:
        time.sleep(0.01)
    port = running.servers[0].sockets[0].getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    with httpx.Client(timeout=60, verify=False) as http:
        yield SimpleNamespace(url=url, keys=texts, gateway=gateway, file=keys, http=http)
    running.should_exit = True
    thread.join()


def client_of(server: Any, who: str = "all") -> openai.OpenAI:
    key = server.keys.get(who, who)
    return openai.OpenAI(base_url=server.url, api_key=key, max_retries=0, timeout=60, http_client=server.http)


def text_of(client: openai.OpenAI, model: str, **more: Any) -> str:
    chunks = client.chat.completions.create(
        model=model, messages=ASK, max_tokens=24, temperature=0, stream=True, **more
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_models_are_listed_for_those_who_may_use_them(server: Any) -> None:
    wanted = {
        "all": ["gym-nano", "gym-nano:ann", "gym-nano:bob"],
        "ann": ["gym-nano", "gym-nano:ann"],
        "bob": ["gym-nano", "gym-nano:bob"],
    }
    for who, names in wanted.items():
        client = client_of(server, who)
        assert [model.id for model in client.models.list()] == names
        assert client.models.retrieve(names[-1]).id == names[-1]


def test_another_s_variant_is_the_404_of_an_unknown_name(server: Any) -> None:
    client, reported = client_of(server, "ann"), []
    for name in ("gym-nano:bob", "gym-nano:nobody"):
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model=name, messages=ASK)
        reported.append(caught.value.response.text.replace(name, "NAME"))
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve(name)
        reported.append(caught.value.response.text.replace(name, "NAME"))
    assert len(set(reported)) == 1


def test_a_key_that_is_taken_away_is_401_from_then_on(server: Any) -> None:
    client = client_of(server, server.file.add("brief"))
    assert client.models.list().data
    server.file.remove("brief")
    with pytest.raises(openai.AuthenticationError, match="unknown here"):
        client.models.list()


def test_metrics_are_for_keys_that_were_made_for_them(server: Any) -> None:
    url = server.url.removesuffix("v1") + "metrics"
    watching = server.file.add("prometheus", base=False, metrics=True)
    for key, status in ((server.keys["all"], 403), (watching, 200), ("wrong", 401)):
        assert server.http.get(url, headers={"authorization": f"Bearer {key}"}).status_code == status


def test_chat_of_the_base_whole_and_streamed(server: Any) -> None:
    client = client_of(server)
    whole = client.chat.completions.create(model="gym-nano", messages=ASK, temperature=0, logprobs=True)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.choices[0].message.content == text_of(client, "gym-nano")
    content = whole.choices[0].logprobs
    assert content is not None
    assert len(content.content or []) == whole.usage.completion_tokens  # type: ignore[union-attr]
    *_, last = client.chat.completions.create(
        model="gym-nano", messages=ASK, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage == whole.usage


def test_users_of_different_variants_at_once_get_their_solo_answers(server: Any) -> None:
    models = ["gym-nano:ann", "gym-nano:bob", "gym-nano"]
    solo = {model: text_of(client_of(server), model) for model in models}
    assert len(set(solo.values())) == 3
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda model: text_of(client_of(server), model), models * 4))
    assert found == [solo[model] for model in models * 4]


def test_a_seed_repeats_an_answer_and_n_gives_several(server: Any) -> None:
    client = client_of(server, "ann")
    ask: dict[str, Any] = {"model": "gym-nano:ann", "prompt": "abc", "seed": 5, "n": 3, "max_tokens": 8}
    first, second = (client.completions.create(**ask, temperature=1.5) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) > 1


def test_an_answer_is_held_to_a_schema(server: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"yes": {"type": "boolean"}},
        "required": ["yes"],
        "additionalProperties": False,
    }
    answer = client_of(server).chat.completions.create(
        model="gym-nano",
        messages=ASK,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    assert set(json.loads(answer.choices[0].message.content or "")) == {"yes"}
    bad: Any = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(server).chat.completions.create(model="gym-nano", messages=ASK, response_format=bad)
    assert caught.value.code == "invalid_json_schema"


def test_a_call_that_is_required_is_one_of_the_tools(serving: Serving) -> None:
    tokenizer = copy.deepcopy(serving.tokenizer)
    tokenizer.chat_template = (
        '{% if tools %}<tool_call>"arguments"{{ tools[0].function.name }}{% endif %}'
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    service = OpenAIService(
        serving.engine,
        Catalogue("gym-nano", serving.store, serving.base.digest),
        tokenizer,
        vocab_size=262,
        fingerprint="fp_1",
        max_at_once=8,
    )
    days = {"type": "object", "properties": {"day": {"enum": ["mon", "tue"]}}, "required": ["day"]}
    names = ("book", "cancel")
    functions = [{"name": name, "parameters": {**days, "additionalProperties": False}} for name in names]
    body = {
        "model": "gym-nano",
        "messages": ASK,
        "temperature": 0,
        "logit_bias": dict.fromkeys(
            ("9", "10", "32"), -100
        ),  # so small a model fills its context with blanks
        "tools": [{"type": "function", "function": function} for function in functions],
    }
    named = {"type": "function", "function": {"name": "cancel"}}
    for choice, allowed in (("required", names), (named, ("cancel",))):
        (answer,) = service.handle(CHAT, {**body, "tool_choice": choice}, LOCAL)["choices"]
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] in allowed
        assert json.loads(call["function"]["arguments"])["day"] in ("mon", "tue")
        assert answer["finish_reason"] == "tool_calls"


def test_embeddings_come_in_the_client_s_own_encoding(server: Any) -> None:
    client = client_of(server)
    found = client.embeddings.create(model="gym-nano:ann", input=["abc", "xyz"])
    plain = client.embeddings.create(model="gym-nano:ann", input="abc", encoding_format="float")
    assert found.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-5)
    assert sum(value**2 for value in plain.data[0].embedding) == pytest.approx(1)
    other = client.embeddings.create(model="gym-nano", input="abc")
    assert other.data[0].embedding != pytest.approx(plain.data[0].embedding, abs=1e-3)


def test_a_client_that_goes_away_ends_its_embeddings(server: Any, serving: Serving) -> None:
    before = serving.engine.stats().embeddings
    key = {"authorization": f"Bearer {server.keys['all']}"}
    body = {"model": "gym-nano", "input": ["x" * 250] * 90}
    with pytest.raises(httpx.TimeoutException):
        server.http.post(f"{server.url}/embeddings", json=body, headers=key, timeout=0.05)
    until = time.monotonic() + SECONDS
    while server.gateway.active or serving.engine.stats().queued:
        assert time.monotonic() < until, "the request goes on"
        time.sleep(0.01)
    assert serving.engine.stats().embeddings - before < 90


def test_a_prompt_beyond_the_context_is_refused_by_that_name(server: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(server).completions.create(model="gym-nano", prompt="x" * 400)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


def test_a_client_that_goes_away_frees_its_place(server: Any, serving: Serving) -> None:
    before = serving.engine.stats()
    client = client_of(server)
    extra = {"ignore_eos": True}
    stream = client.completions.create(
        model="gym-nano", prompt="a", max_tokens=250, stream=True, extra_body=extra
    )
    next(iter(stream))
    stream.close()
    until = time.monotonic() + SECONDS
    while serving.engine.stats().finished["cancelled"] == before.finished["cancelled"]:
        assert time.monotonic() < until, "the generation went on"
        time.sleep(0.01)
    while server.gateway.active:
        assert time.monotonic() < until, "the request is still counted"
        time.sleep(0.01)
    assert serving.engine.stats().running == 0


async def test_an_async_client_is_served_too(server: Any) -> None:
    async with openai.AsyncOpenAI(base_url=server.url, api_key=server.keys["bob"], max_retries=0) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(model="gym-nano:bob", prompt="abc", temperature=0, max_tokens=4)
                for _ in range(4)
            )
        )
    assert len({answer.choices[0].text for answer in answers}) == 1


def test_use_is_logged_under_the_base_s_digest(server: Any, serving: Serving) -> None:
    from gym_server.ledger.royalties import read_usage

    log = serving.config.usage_log
    assert log is not None
    answer = client_of(server, "ann").completions.create(model="gym-nano:ann", prompt="abc", max_tokens=4)
    used, _ = read_usage(log)
    assert set(used) == {serving.base.digest}
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["model"], last["key"]) == ("gym-nano:ann", "ann")
    assert last["tokens"] == answer.usage.total_tokens  # type: ignore[union-attr]
