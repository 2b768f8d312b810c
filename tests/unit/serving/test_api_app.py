"""The HTTP application over a scripted engine: statuses, refusals, metrics, timeouts and draining."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest

from gym_fed.config.serving import ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http.admitted import MAX_BODY_BYTES
from gym_fed.serving.http.app import create_app
from gym_fed.serving.http.gateway import Gateway
from gym_fed.serving.http.keys import Authenticator
from gym_fed.serving.http.server import listen
from gym_fed.serving.http.usage_log import UsageLog, Use
from gym_fed.serving.openai.catalogue import Caller, Catalogue
from gym_fed.serving.openai.service import CHAT, COMPLETIONS, EMBEDDINGS, OpenAIService
from tests.support.scripted_engine import ScriptedEngine

BODY = {"model": "nano", "prompt": "x"}


class Letters:
    """A tokenizer of one token a letter."""

    chat_template = None
    added_tokens_decoder: ClassVar[dict[int, Any]] = {}

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 256 for letter in text]}


def gateway_over(engine: ScriptedEngine, seconds: float = 60.0, uses: list[Use] | None = None) -> Gateway:
    gateway = Gateway(Authenticator(None), request_timeout_seconds=seconds)
    service = OpenAIService(
        engine,
        Catalogue("nano"),
        Letters(),
        vocab_size=256,
        fingerprint="fp_1",
        max_at_once=20,
        on_use=None if uses is None else uses.append,
    )
    gateway.serving = SimpleNamespace(  # type: ignore[assignment]
        service=service, engine=engine, store=None, usage_log=None, content_filter=None
    )
    return gateway


def client_of(gateway: Gateway) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(gateway), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(gateway_over(ScriptedEngine())) as client:
        yield client


async def test_an_answer_is_given_whole_or_as_events_that_end_with_done(client: httpx.AsyncClient) -> None:
    whole = await client.post(COMPLETIONS, json=BODY)
    assert (whole.status_code, whole.json()["choices"][0]["text"]) == (200, "hello")
    stream = await client.post(COMPLETIONS, json={**BODY, "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in stream.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == "hello"


@pytest.mark.parametrize(
    ("method", "url", "content", "headers", "status", "code"),
    [
        ("GET", "/v1/nothing", "", {}, 404, "not_found"),
        ("PUT", "/v1/models", "", {}, 405, "method_not_allowed"),
        ("GET", "/v1/models/other", "", {}, 404, "model_not_found"),
        ("POST", COMPLETIONS, '{"model": "nano:x", "prompt": "x"}', {}, 404, "model_not_found"),
        ("POST", COMPLETIONS, "{", {}, 400, "invalid_json"),
        ("POST", COMPLETIONS, "[" * 100_000, {}, 400, "invalid_json"),
        ("POST", COMPLETIONS, '{"model": "nano", "prompt": "x", "top_p": NaN}', {}, 400, "invalid_json"),
        ("POST", COMPLETIONS, '{"model": "nano", "model": "nano"}', {}, 400, "invalid_json"),
        ("POST", COMPLETIONS, "{}", {"content-encoding": "gzip"}, 400, "invalid_value"),
        (
            "POST",
            COMPLETIONS,
            "{}",
            {"content-type": "application/json; charset=latin-1"},
            400,
            "invalid_value",
        ),
        ("POST", COMPLETIONS, "[]", {}, 400, "invalid_value"),
        ("POST", COMPLETIONS, "x" * (MAX_BODY_BYTES + 1), {}, 413, "too_large"),
        ("POST", COMPLETIONS, "{}", {"content-type": "text/plain"}, 400, "invalid_value"),
        ("POST", CHAT, "{}", {"origin": "http://evil.example"}, 403, "permission_denied"),
        ("GET", "/metrics", "", {"host": "evil.example"}, 403, "permission_denied"),
    ],
)
async def test_every_refusal_has_openai_s_form(
    client: httpx.AsyncClient,
    method: str,
    url: str,
    content: str,
    headers: dict[str, str],
    status: int,
    code: str,
) -> None:
    headers = {"content-type": "application/json", **headers}
    answer = await client.request(method, url, content=content, headers=headers)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert set(error) == {"message", "type", "param", "code"}


async def test_a_wrong_url_or_method_names_what_there_is(client: httpx.AsyncClient) -> None:
    lost = (await client.get("/v1/nothing")).json()["error"]["message"]
    for known in (
        "GET /v1/models,",
        "GET /v1/models/{name}",
        "POST /v1/chat/completions",
        "POST /tokenize",
        "POST /v1/load_lora_adapter",
        "DELETE /v1/responses/{answer_id}",
        "GET /v1/chat/completions/{answer_id}",
        "GET /health",
    ):
        assert known in lost
    wrong = await client.put("/tokenize", json={})
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "OPTIONS, POST")
    assert "this URL accepts POST" in wrong.json()["error"]["message"]


async def test_a_body_without_a_declared_size_is_cut_off_at_the_cap(client: httpx.AsyncClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 2**20

    answer = await client.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
    assert answer.status_code == 413


async def test_a_full_queue_is_429_and_says_when_to_come_back() -> None:
    engine = ScriptedEngine(error=GymError(ErrorCode.BUSY, "256 requests are waiting already", "try again"))
    async with client_of(gateway_over(engine)) as client:
        answer = await client.post(COMPLETIONS, json=BODY)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["error"]["type"] == "rate_limit_error"


async def test_probes_while_the_model_is_loaded_log_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    gateway = gateway_over(ScriptedEngine())
    gateway.serving = None
    async with client_of(gateway) as client:
        answer = await client.get("/ready")
    assert answer.status_code == 503
    assert "the model is being loaded" in answer.text
    assert "a file of the server" not in answer.text
    assert not [record for record in caplog.records if record.name.startswith("gym_fed")]


async def test_health_is_of_the_process_and_ready_of_the_model() -> None:
    gateway = gateway_over(ScriptedEngine())
    serving, gateway.serving = gateway.serving, None
    async with client_of(gateway) as client:

        async def statuses() -> list[int]:
            urls = ("/health", "/ready", "/v1/models")
            return [(await client.get(url)).status_code for url in urls]

        assert await statuses() == [200, 503, 503]
        assert (await client.post(COMPLETIONS, json=BODY)).headers["retry-after"] == "5"
        gateway.serving = serving
        assert await statuses() == [200, 200, 200]
        gateway.draining = True
        assert await statuses() == [200, 503, 503]
        assert (await client.post(COMPLETIONS, json=BODY)).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leaving", [False, True])
async def test_an_answer_that_takes_too_long_or_outlives_the_server_is_cancelled_and_reported(
    stream: bool, leaving: bool
) -> None:
    engine = ScriptedEngine(endless=True)
    gateway = gateway_over(engine, seconds=60.0 if leaving else 0.2)
    async with client_of(gateway) as client:
        answering = asyncio.ensure_future(client.post(COMPLETIONS, json={**BODY, "stream": stream}))
        while leaving and not engine.generations:
            await asyncio.sleep(0.01)
        if leaving:
            gateway.stopped.set()
        answer = await answering
    name, status = ("unavailable", 503) if leaving else ("deadline_exceeded", 504)
    if stream and answer.status_code == 200:
        last = answer.text.strip().split("\n\n")[-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == name
    else:
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, name)
    assert engine.generations[0].cancelled
    assert gateway.active == 0


async def test_embeddings_that_take_too_long_are_cancelled_and_finished_ones_are_reported() -> None:
    uses: list[Use] = []
    engine = ScriptedEngine(endless=True)
    async with client_of(gateway_over(engine, seconds=0.2, uses=uses)) as client:
        body = {"model": "nano", "input": ["abc", "x", "x"]}
        answer = await client.post(EMBEDDINGS, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert [made.cancelled for made in engine.embeddings] == [False, True, True]
        assert [use.prompt_tokens for use in uses] == [3]
        too_many = await client.post(EMBEDDINGS, json={**body, "input": ["x"] * 21})
        assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "input")
        assert len(engine.embeddings) == 3
    engine = ScriptedEngine(error=GymError(ErrorCode.BUSY, "64 are waiting already"), after=2)
    async with client_of(gateway_over(engine)) as client:
        assert (await client.post(EMBEDDINGS, json=body)).status_code == 429
    assert [made.cancelled for made in engine.embeddings] == [True, True]


async def test_one_caller_s_long_requests_leave_threads_to_others() -> None:
    gateway = gateway_over(ScriptedEngine())
    held = asyncio.Event()
    inside: list[str] = []

    async def reads(name: str) -> None:
        async with gateway.parser_slot(Caller(name)):
            inside.append(name)
            await held.wait()

    reading = [asyncio.ensure_future(reads(name)) for name in ["ann"] * 9 + ["bob"]]
    await asyncio.sleep(0.01)
    assert inside == ["ann"] * 4 + ["bob"]
    held.set()
    await asyncio.gather(*reading)
    assert len(inside) == 10


async def test_a_defect_is_reported_without_its_inside() -> None:
    engine = ScriptedEngine(error=ValueError("secret"))  # type: ignore[arg-type]
    async with client_of(gateway_over(engine)) as client:
        answer = await client.post(COMPLETIONS, json=BODY)
    assert answer.status_code == 500
    assert "secret" not in answer.text
    assert answer.headers["Connection"] == "close"  # a client must not send the next one there


async def test_metrics_count_by_routes_that_nobody_can_choose(client: httpx.AsyncClient) -> None:
    await client.post(COMPLETIONS, json=BODY)
    for number in range(3):
        await client.get(f"/v1/models/name{number}")
        await client.get(f"/elsewhere{number}")
    text = (await client.get("/metrics")).text
    assert 'gym_api_requests_total{route="/v1/completions",status="200"} 1.0' in text
    assert 'gym_api_requests_total{route="/v1/models/{id}",status="404"} 3.0' in text
    assert 'gym_api_requests_total{route="other",status="404"} 3.0' in text
    assert 'gym_api_request_seconds_count{route="/v1/completions"} 1.0' in text
    assert "gym_engine_healthy 1.0" in text
    assert 'gym_engine_packed_products_total{form="levels"} 3.0' in text
    assert 'gym_engine_forwards_total{forward="decoder"} 2.0' in text
    assert 'gym_engine_first_token_seconds_bucket{le="+Inf"} 0.0' in text
    assert "name1" not in text
    assert "elsewhere" not in text


def test_the_hub_reads_the_usage_log_and_finds_the_version(tmp_path: Path) -> None:
    from gym_server.ledger.royalties import read_usage

    from gym_fed.trust.ledger.royalties import PaidVersion, find_version

    digest = f"sha256:{'a' * 64}"
    path = tmp_path / "usage.jsonl"
    path.write_bytes(b'{"torn')
    log = UsageLog(path, digest)
    log.write(Use(CHAT, "nano:ann", "key1", 'a "name"\n', 5, 7))
    log.write(Use(CHAT, "nano", "key1", None, 3, 0))
    log.write(Use(CHAT, "nano", "key1", None, 0, 0))
    log.close()
    used, _ = read_usage(path)
    assert used == {digest: 15}
    versions = [PaidVersion(1, "sha256:other", 1, None), PaidVersion(2, digest, 2, None)]
    assert find_version(versions, next(iter(used))) == 2
    first = json.loads(path.read_text().splitlines()[0])
    assert (first["model"], first["key"], first["user"]) == ("nano:ann", "key1", 'a "name"\n')
    UsageLog(tmp_path / "new.jsonl", digest).close()
    assert (tmp_path / "new.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_full_disk_costs_the_usage_log_no_line_but_those_it_could_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "usage.jsonl"
    log = UsageLog(path, "sha256:1")
    log.write(Use(CHAT, "nano", "first", None, 1, 1))
    real = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda file, data: real(file, data[:9]))
        log.write(Use(CHAT, "nano", "second", None, 1, 1))
    log.write(Use(CHAT, "nano", "third", None, 1, 1))
    log.close()
    assert [json.loads(line)["key"] for line in path.read_text().splitlines()] == ["first", "third"]
    assert log.lost == 1
    assert '"key": "second"' in caplog.text


async def test_connections_send_small_answers_at_once() -> None:
    options: list[int] = []

    async def look(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted = writer.get_extra_info("socket")
        options.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    listener = listen(ServingConfig(port=0))
    async with await asyncio.start_server(look, sock=listener):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        await reader.read()
        writer.close()
    assert options == [1]


def test_every_figure_of_engine_and_store_that_is_exported_exists() -> None:
    from gym_fed.serving.engine.stats import EngineStats
    from gym_fed.serving.http import metrics
    from gym_fed.serving.store.variant_cache import StoreStats

    engine = (*metrics._ENGINE, *metrics._ENGINE_BY, *metrics._ENGINE_TIMES)
    names: dict[Any, set[str]] = {
        EngineStats: {row.name.removeprefix("gym_engine_").removesuffix("_seconds") for row in engine},
        StoreStats: {row.name.removeprefix("gym_variants_") for row in metrics._STORE},
    }
    names[EngineStats] -= {"busy", "model"}
    names[EngineStats] |= {"busy_seconds", "model_seconds"}
    for stats, exported in names.items():
        assert (
            exported | {"healthy", "finished", "forwards", "sign_products", "packed_products"}
            >= set(stats.__dataclass_fields__)
            >= exported
        )
