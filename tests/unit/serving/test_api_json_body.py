"""Bodies designed to block a server: many values, deep nesting, and where they are parsed."""

from __future__ import annotations

import asyncio
import json
import threading
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from gym_fed.core.bounded.pool import evaluation_owner
from gym_fed.core.errors import ErrorCode
from gym_fed.core.json_files import MAX_REQUEST_DEPTH, strict_json
from gym_fed.serving.http import admitted
from gym_fed.serving.http.admitted import MAX_BODY_BYTES, MAX_VALUES, parse_body
from gym_fed.serving.http.keys import Authenticator, KeyFile
from gym_fed.serving.openai import schemas
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.openai.refusals import RequestError
from gym_fed.serving.openai.service import CHAT, COMPLETIONS
from tests.support.scripted_engine import ScriptedEngine
from tests.unit.serving.test_api_app import BODY, client_of, gateway_over


def list_of(value: str, number: int) -> bytes:
    return f"[{','.join([value] * number)}]".encode()


@pytest.mark.parametrize(
    "body",
    [
        list_of("{}", MAX_BODY_BYTES // 3 - 1),
        list_of("1", MAX_VALUES + 1),
        list_of('""', MAX_VALUES + 1),
        list_of('"\\""', MAX_VALUES + 1),
        b"[" * (MAX_BODY_BYTES - 1),
        b'[""' + b'"' * (MAX_BODY_BYTES // 2) + b"," * (MAX_VALUES + 1),
    ],
    ids=["objects", "numbers", "texts", "quotes", "lists", "broken"],
)
async def test_a_body_of_very_many_values_is_refused_before_it_is_parsed(
    body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []
    monkeypatch.setattr(admitted, "strict_json", lambda data: parsed.append(len(data)))
    async with client_of(gateway_over(ScriptedEngine())) as client:
        answer = await client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert not parsed


@pytest.mark.parametrize(
    "text",
    ["a, b, " * 600_000, '{"a": [1, 2, 3]}' * 200_000, '\\"[{,' * 300_000],
    ids=["prose", "json", "quoted"],
)
def test_texts_are_counted_by_their_bytes_alone(text: str) -> None:
    given = {"prompt": text, "model": "nano"}
    assert parse_body(bytearray(json.dumps(given).encode())) == given


def test_arguments_of_a_call_with_more_values_than_a_body_may_have_are_refused_before_they_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments = json.dumps({"a": json.loads(list_of("{}", schemas.MAX_ARGUMENT_MARKS))})
    parse_body(
        bytearray(json.dumps({"arguments": arguments}).encode())
    )  # which the limit of a body lets pass
    monkeypatch.setattr(schemas.json, "loads", lambda text: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match="too many values"):
        schemas.FunctionCall(name="f", arguments=arguments)


def test_as_many_values_as_may_be_are_parsed() -> None:
    assert parse_body(bytearray(list_of("1", MAX_VALUES))) == [1] * MAX_VALUES
    with pytest.raises(RequestError) as caught:
        parse_body(bytearray(list_of("1", MAX_VALUES + 1)))
    assert caught.value.code is ErrorCode.TOO_LARGE


async def test_a_body_is_parsed_beside_the_event_loop_in_its_caller_s_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[int] = []

    def seen(data: Any) -> Any:
        threads.append(threading.get_ident())
        return strict_json(data)

    monkeypatch.setattr(admitted, "strict_json", seen)
    gateway = gateway_over(ScriptedEngine())
    async with client_of(gateway) as client:
        async with AsyncExitStack() as held:
            for _ in range(4):
                await held.enter_async_context(gateway.parser_slot(LOCAL))
            request = asyncio.ensure_future(client.post(COMPLETIONS, json=BODY))
            await asyncio.sleep(0.05)
            assert not threads, "all of the caller's slots are taken"
        answer = await request
    assert answer.status_code == 200
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


async def test_a_keyed_caller_has_a_share_of_the_template_processes_and_a_server_without_keys_has_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners: list[str | None] = []

    def seen(data: Any) -> Any:
        owners.append(evaluation_owner.get())
        return strict_json(data)

    monkeypatch.setattr(admitted, "strict_json", seen)
    gateway = gateway_over(ScriptedEngine())
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("local")
    async with client_of(gateway) as client:
        assert (await client.post(COMPLETIONS, json=BODY)).status_code == 200
        gateway.authenticator = Authenticator(keys)
        client.headers["authorization"] = f"Bearer {key}"
        assert (await client.post(COMPLETIONS, json=BODY)).status_code == 200
    assert owners == [None, "local"]


@pytest.mark.parametrize("depth", [MAX_REQUEST_DEPTH - 8, MAX_REQUEST_DEPTH + 8, 500, 700, 900, 100_000])
@pytest.mark.parametrize("field", ["tools", "response_format", "metadata"])
async def test_deep_nesting_is_refused_or_understood(depth: int, field: str) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    value = {
        "tools": f'[{{"type": "function", "function": {{"name": "f", "parameters": {deep}}}}}]',
        "response_format": f'{{"type": "json_schema", "json_schema": {{"name": "n", "schema": {deep}}}}}',
        "metadata": deep,
    }[field]
    body = f'{{"model": "nano", "messages": [{{"role": "user", "content": "x"}}], "{field}": {value}}}'
    async with client_of(gateway_over(ScriptedEngine())) as client:
        answer: httpx.Response = await client.post(
            CHAT, content=body, headers={"content-type": "application/json"}
        )
    assert answer.status_code == 400
    assert (answer.json()["error"]["code"] == "invalid_json") == (depth > MAX_REQUEST_DEPTH)
