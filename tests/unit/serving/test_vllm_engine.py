"""``engine: vllm`` over a fake vLLM in a process of its own: answers, variants, salts, refusals, kills and restarts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.base.models import folder_here
from gym_fed.cli.main import app
from gym_fed.config.serving import ServingConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.registries import ENGINES
from gym_fed.delta.file import DeltaFile
from gym_fed.serving.engine.request import GenerationRequest, Grammar, SamplingParams
from gym_fed.serving.http.keys import KeyFile
from gym_fed.serving.openai.catalogue import LOCAL
from gym_fed.serving.setup import open_serving
from gym_fed.serving.store.signing import sign_variant
from gym_fed.serving.vllm.engine import VllmEngine
from gym_fed.serving.vllm.process import VllmProcess
from gym_fed.serving.vllm_plugin.variants import require_servable
from gym_fed.trust.identity.keys import SigningKey
from tests.support.added_tokens import save_with_tokens
from tests.support.api_server import api_server
from tests.support.fake_vllm.vllm.entrypoints.cli.main import SLOW
from tests.support.nano_store import nano_store
from tests.support.vllm_server import FAKE, asked, fake_python, is_alive, vllm_serving
from tests.support.wait import SECONDS, until

PROMPT = [72, 101, 108, 108, 111]
"""gym-nano's tokens are bytes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def serving(folder: Path) -> Any:
    nano_store(folder / "store", ["ada"])
    with vllm_serving(folder, variants=folder / "store", engine={"max_concurrent": 2}) as opened:
        yield opened


def process_of(serving: Any) -> VllmProcess:
    assert isinstance(serving.engine, VllmEngine)
    server = serving.engine.server
    assert isinstance(server, VllmProcess)
    return server


def request(ids: list[int], variant: str | None = None, user: str = "", **sampling: Any) -> GenerationRequest:
    return GenerationRequest(ids, SamplingParams(**{"max_tokens": 5, **sampling}), variant, user)


def test_answer_has_the_tokens_and_their_text(serving: Any) -> None:
    result = serving.engine.submit(request(PROMPT, logprobs=1)).result(SECONDS)
    assert result.token_ids == tuple(PROMPT)
    assert result.text == "Hello"
    assert (result.finish_reason, result.cached_tokens) == ("length", 3)
    assert [(each.token_id, each.data, each.logprob) for each in result.logprobs[:1]] == [(72, b"H", -0.5)]
    assert result.logprobs[0].top[0] == (72, b"H", -0.5)


def test_end_tokens_and_stop_texts_end_an_answer(serving: Any) -> None:
    end = max(serving.engine.end_ids)
    ended = serving.engine.submit(request([72, end, 72], max_tokens=50)).result(SECONDS)
    assert (ended.text, ended.finish_reason) == ("H", "stop")
    stopped = serving.engine.submit(request(PROMPT, max_tokens=50, stop=("lo",))).result(SECONDS)
    assert (stopped.text, stopped.finish_reason) == ("Hel", "stop")


def test_chat_is_answered_over_the_api(serving: Any) -> None:
    body = {"model": serving.served_name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
    answer = serving.service.handle("/v1/chat/completions", body, LOCAL)
    assert answer["usage"]["completion_tokens"] == 3


def test_variant_is_requested_by_its_digest(serving: Any, folder: Path) -> None:
    serving.engine.submit(request(PROMPT, "ada")).result(SECONDS)
    assert asked(folder, "body")[-1]["model"] == serving.store.get("ada").sha256
    with pytest.raises(GymError) as error:
        serving.engine.submit(request(PROMPT, "nobody"))
    assert error.value.code is ErrorCode.NOT_FOUND


def test_unsigned_variant_never_reaches_vllm(folder: Path, serving: Any) -> None:
    from gym_fed.serving.store.store import VariantStore

    with VariantStore.open(serving.store.folder, require_signature=False) as store:
        store.add(store.path("ada"), name="unsigned", owner="somebody")
    before = len(asked(folder, "body"))
    with pytest.raises(GymError) as error:
        serving.engine.submit(request(PROMPT, "unsigned")).result(SECONDS)
    assert error.value.code is ErrorCode.SIGNATURE_INVALID
    assert len(asked(folder, "body")) == before


def test_variant_with_added_tokens_is_refused_by_name(serving: Any, folder: Path) -> None:
    base = folder_here("gym-nano")
    assert base is not None
    save_with_tokens(base, folder / "tuned", ["<tool>"])
    delta, key = folder / "tools.gymdelta", SigningKey.generate()
    words = ["delta", "encode", "gym-nano", str(folder / "tuned"), "-o", str(delta)]
    assert CliRunner().invoke(app, words).exit_code == 0
    signed = sign_variant(delta, key, name="tools")
    serving.store.add(delta, signed, name="tools", owner=key.contributor)
    with pytest.raises(GymError, match=r"variant 'tools' changes the base's tokenizer") as error:
        serving.engine.submit(request(PROMPT, "tools"))
    assert error.value.code is ErrorCode.USAGE
    with DeltaFile.open(delta, added_tokens=True) as opened, pytest.raises(GymError, match="<tool>"):
        require_servable(opened, 16)


def test_users_have_salts_of_their_own(serving: Any, folder: Path) -> None:
    for user in ("ada", "bob", "ada"):
        serving.engine.submit(request(PROMPT, user=user)).result(SECONDS)
    first, second, third = [body["cache_salt"] for body in asked(folder, "body")[-3:]]
    assert first == third != second


def test_at_most_max_concurrent_requests_are_inside_vllm(serving: Any, folder: Path) -> None:
    before = len(asked(folder, "running"))
    answers = [serving.engine.submit(request([SLOW, *PROMPT], user=str(n))) for n in range(6)]
    assert all(answer.result(SECONDS).finish_reason == "length" for answer in answers)
    assert max(asked(folder, "running")[before:]) <= 1  # besides the request that logs it


def test_cancelled_answer_is_cancelled_in_vllm(serving: Any, folder: Path) -> None:
    prompt = [SLOW, 88, 89, 90]
    answer = serving.engine.submit(request(prompt, max_tokens=100))
    next(answer)
    answer.cancel()
    assert answer.result(SECONDS).finish_reason == "cancelled"
    until(lambda: prompt in asked(folder, "ended"), "the stream ends in vLLM")


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"temperature": 0.005}, "temperature"),
        ({"logit_bias": {5: 500.0}}, "logit_bias"),
        ({"grammar": Grammar("calls", '{"lark": "start: TEXT", "schemas": {}}')}, "tool_choice"),
    ],
)
def test_parameter_that_vllm_would_change_is_refused_by_name(
    serving: Any, sampling: dict[str, Any], named: str
) -> None:
    with pytest.raises(GymError, match=named) as error:
        serving.engine.submit(request(PROMPT, **sampling))
    assert error.value.code is ErrorCode.USAGE


def test_embeddings_are_refused_by_name(serving: Any) -> None:
    with pytest.raises(GymError, match="embeddings"):
        serving.service.handle("/v1/embeddings", {"model": serving.served_name, "input": "a"}, LOCAL)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"base_format": "int8"}, "base_format"),
        ({"engine": {"kind": "vllm", "speculative": "ngram"}}, "engine.speculative"),
        ({"vllm": {"url": "http://127.0.0.1:1", "variant_slots": 4}}, "vllm.variant_slots"),
    ],
)
def test_setting_of_the_other_engine_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    config = ServingConfig(**{"base": "gym-nano", "engine": "vllm", **settings})
    with pytest.raises(GymError, match=named) as error:
        ENGINES.new("vllm").check(config)
    assert error.value.code is ErrorCode.CONFIG_INVALID


def test_settings_of_vllm_without_the_engine_are_refused() -> None:
    with pytest.raises(ValueError, match=r"engine\.kind is own"):
        ServingConfig(vllm={"variant_slots": 4})


def test_missing_vllm_is_named_with_the_remedy(tmp_path: Path) -> None:
    config = ServingConfig(base="gym-nano", engine="vllm", vllm={"python": tmp_path / "python"})
    with pytest.raises(GymError, match="make vllm") as error:
        open_serving(config)
    assert error.value.code is ErrorCode.MISSING_DEPENDENCY


def test_failed_start_is_reported_with_the_last_lines(tmp_path: Path) -> None:
    with pytest.raises(GymError, match="the fake vLLM fails on request") as error:
        vllm_serving(tmp_path, vllm={"args": ["--fail"]}).__enter__()
    assert error.value.code is ErrorCode.UNAVAILABLE


def test_killed_vllm_is_started_again_and_nothing_else_is_lost(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("ada", everything=True)
    with vllm_serving(tmp_path, engine={"max_concurrent": 1}) as serving, api_server(serving, keys) as server:
        process = process_of(serving)
        first = process.pid
        assert first is not None
        running = serving.engine.submit(request([SLOW, 72], max_tokens=200))
        next(running)
        waiting = serving.engine.submit(request([SLOW, 72], max_tokens=2))
        os.kill(first, signal.SIGKILL)
        with pytest.raises(GymError) as error:
            running.result(SECONDS)
        assert error.value.code is ErrorCode.UNAVAILABLE
        until(lambda: not process.ready, "the watch sees it")
        body = {"model": serving.served_name, "prompt": "Hi", "max_tokens": 2}
        headers = {"Authorization": f"Bearer {key}"}
        refused = server.http.post(f"{server.url}/completions", json=body, headers=headers)
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert waiting.result(SECONDS).finish_reason == "length"  # it kept its place
        assert process.starts == 2
        answered = server.http.post(f"{server.url}/completions", json=body, headers=headers)
        assert answered.status_code == 200
        second = process.pid
        assert second is not None
    assert not is_alive(first)
    assert not is_alive(second)


def test_vllm_ends_when_the_gateway_is_gone(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*filter(None, sys.path), str(FAKE)]),
        "VLLM_API_KEY": "key",
    }
    command = [fake_python(tmp_path), "-P", "-m", "gym_fed.serving.vllm_plugin.launch", "serve", "model"]
    socket = tmp_path / "s"
    with subprocess.Popen(
        [*map(str, command), "--uds", str(socket)],
        env=environment,
        stdin=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        until(socket.exists, "it listens")
        assert child.stdin is not None
        child.stdin.close()  # as the end of the gateway's process does
        assert child.wait(SECONDS) == -signal.SIGKILL
