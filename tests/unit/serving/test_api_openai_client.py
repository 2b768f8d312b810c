"""The real openai client against the real engine on gym-nano, over HTTP on loopback."""

from __future__ import annotations

import asyncio
import copy
import json
import re
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from gym_fed.base.models import load_model
from gym_fed.config.serving import ServingConfig
from gym_fed.serving.http.keys import KeyFile
from gym_fed.serving.openai.catalogue import LOCAL, Catalogue
from gym_fed.serving.openai.service import CHAT, OpenAIService
from gym_fed.serving.setup import Serving, open_serving
from gym_fed.serving.store.signing import sign_variant
from gym_fed.trust.identity.keys import SigningKey
from tests.support.api_server import api_server
from tests.support.nano_store import nano_store, signs
from tests.support.variants import write_random_delta
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
    with api_server(serving, keys) as running:
        yield SimpleNamespace(**vars(running), keys=texts, file=keys)


def client_of(server: Any, who: str = "all") -> openai.OpenAI:
    key = server.keys.get(who, who)
    return openai.OpenAI(
        base_url=server.url, api_key=key, max_retries=0, timeout=SECONDS, http_client=server.http
    )


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
    with pytest.raises(openai.AuthenticationError, match="unknown or has expired"):
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
    assert "".join(token.token for token in content.content or []) == whole.choices[0].message.content
    *_, last = client.chat.completions.create(
        model="gym-nano", messages=ASK, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.total_tokens == whole.usage.total_tokens


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


def test_choices_of_a_stream_come_as_their_tokens_do_and_are_those_of_the_whole_answer(server: Any) -> None:
    asked: dict[str, Any] = {"model": "gym-nano", "messages": ASK, "n": 3, "seed": 5, "temperature": 1.5}
    asked |= {"max_tokens": 12, "extra_body": {"ignore_eos": True}}
    client = client_of(server)
    whole = client.chat.completions.create(**asked)
    texts, order = ["", "", ""], []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.content:
                order.append(choice.index)
    assert texts == [choice.message.content for choice in whole.choices]
    first_end = min(len(order) - 1 - order[::-1].index(index) for index in range(3))
    assert set(order[:first_end]) == {0, 1, 2}, "one choice ended before another began"


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


def test_texts_and_messages_are_tokenized_as_requests_are_and_back(server: Any) -> None:
    root = server.url.removesuffix("/v1")
    headers = {"authorization": f"Bearer {server.keys['ann']}"}

    def post(url: str, **body: Any) -> Any:
        return server.http.post(f"{root}{url}", json=body, headers=headers)

    chat = post("/tokenize", model="gym-nano:ann", messages=ASK).json()
    used = client_of(server, "ann").chat.completions.create(model="gym-nano:ann", messages=ASK, max_tokens=1)
    assert used.usage is not None
    assert chat["count"] == len(chat["tokens"]) == used.usage.prompt_tokens
    assert chat["max_model_len"] >= chat["count"]
    text = post("/detokenize", model="gym-nano", tokens=chat["tokens"]).json()["prompt"]
    assert "Reverse: abc" in text
    plain = post("/tokenize", prompt="abc", add_special_tokens=False, return_token_strs=True).json()
    assert post("/detokenize", tokens=plain["tokens"]).json() == {"prompt": "abc"}
    assert len(plain["token_strs"]) == plain["count"]
    assert post("/tokenize", prompt="").json()["count"] == 0
    refused = [
        (post("/tokenize", model="gym-nano:bob", prompt="a"), 404, "model"),
        (post("/tokenize", prompt="a", messages=ASK), 400, "prompt"),
        (post("/tokenize", prompt="a", unknown=1), 400, "unknown"),
        (post("/detokenize", tokens=[10**6]), 400, "tokens"),
        (post("/tokenize", prompt="ab " * 1_000_000), 400, "prompt"),
    ]
    for answer, status, param in refused:
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert server.http.post(f"{root}/tokenize", json={"prompt": "a"}).status_code == 401


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


def test_errors_hold_neither_paths_of_the_server_nor_digests(server: Any, serving: Serving) -> None:
    assert serving.store is not None
    model = load_model("gym-nano").model
    delta = write_random_delta(model, serving.store.folder / "x.gymdelta", signs, seed=7, size=0.1)
    key = SigningKey.generate()
    for name in ("damaged", "lost", "forged", "revoked", "row"):
        serving.store.add(
            write_random_delta(model, delta, signs, seed=len(name), size=0.1),
            sign_variant(delta, key, name=name, note=name),
            name=name,
            owner=key.contributor,
        )
    serving.store.path("damaged").write_bytes(b"x" * 100)
    serving.store.path("lost").unlink()
    with sqlite3.connect(serving.store.folder / "variants.db") as rows:
        rows.execute("UPDATE variants SET note = 'other' WHERE name = 'forged'")
        rows.execute("UPDATE variants SET sha256 = '../../x' WHERE name = 'row'")
    headers = {"authorization": f"Bearer {server.keys['all']}"}
    bodies: list[dict[str, Any]] = [
        {"model": f"gym-nano:{name}"} for name in ("damaged", "lost", "forged", "row")
    ]
    bodies += [
        {"model": "gym-nano", **more} for more in ({"max_tokens": -1}, {"x": 1}, {"seed": "/etc/passwd"})
    ]
    bodies += [{"model": "../../etc/passwd"}, {"model": "gym-nano:../x"}, {}, {"model": "gym-nano:none"}]
    answers = [
        server.http.post(f"{server.url}/{url}", json={field: value, **body}, headers=headers)
        for body in bodies
        for url, field, value in (("chat/completions", "messages", ASK), ("completions", "prompt", "a"))
    ]
    stream = {"model": "gym-nano:damaged", "messages": ASK, "stream": True}
    answers.append(server.http.post(f"{server.url}/chat/completions", json=stream, headers=headers))
    answers.append(
        server.http.post(
            f"{server.url}/embeddings", json={"model": "gym-nano:lost", "input": "a"}, headers=headers
        )
    )
    answers.append(server.http.get(f"{server.url}/models/gym-nano:row", headers=headers))
    for name in ("damaged", "lost", "forged", "revoked", "row"):
        serving.store.remove(name)
    inside = (
        str(serving.store.folder),
        str(Path.home()),
        ".gymdelta",
        "variants.db",
        "objects/",
        "Traceback",
    )
    for answer in answers:
        assert answer.status_code >= 400, answer.text
        assert not [one for one in inside if one in answer.text], answer.text
        assert not re.search(r"[0-9a-f]{12}", answer.text), answer.text
    codes = {answer.json()["error"]["code"] for answer in answers}
    assert {
        "hash_mismatch",
        "signature_invalid",
        "file_not_found",
        "state_corrupt",
        "model_not_found",
    } <= codes


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
