"""`gym api` as a real process: two users at once, what is refused, a full queue, clients that leave, and SIGTERM."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from typer.testing import CliRunner

from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.evaluation.records.reader import read_record
from gym_fed.serving.http.keys import KeyFile
from gym_fed.serving.http.server import DRAIN_SECONDS, LEAVE_SECONDS
from tests.support.nano_store import nano_store
from tests.support.wait import SECONDS
from tests.support.warm import WarmProcess

GYM = Path(sys.executable).parent / "gym"
ASK: list[Any] = [{"role": "user", "content": "Reverse: abc"}]
SETTINGS = """
base: gym-nano
variants: store
api_keys: keys.json
usage_log: usage.jsonl
device: cpu
num_threads: 1
engine:
  max_concurrent: 2
  max_queued: 1
"""

HANGING = """
import os, signal, threading
from gym_fed.config.serving import ServingConfig
from gym_fed.serving.http import server

def hanging(config):
    never = threading.Event()
    return type("Serving", (), {{"close": never.wait}})()

server.open_serving, server.LEAVE_SECONDS = hanging, {seconds}
server.run_server(
    ServingConfig(port=0),
    drain_seconds=0.0,
    on_ready=lambda address, serving: os.kill(os.getpid(), signal.SIGTERM),
)
"""
"""A server whose parts do not close."""


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The process, its address, ann's and bob's keys, and one that may read the metrics."""
    folder = tmp_path_factory.mktemp("api")
    owners = nano_store(folder / "store", ["ann", "bob"])
    (folder / "serving.yaml").write_text(SETTINGS)
    keys = KeyFile(folder / "keys.json")
    texts = {name: keys.add(name, owners=(owner,)) for name, owner in owners.items()}
    texts["watcher"] = keys.add("watcher", base=False, metrics=True)
    words = [GYM, "api", "serving.yaml", "--port", "0", "--json", "--drain-seconds", "120"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "said").open("w") as said:
        process = WarmProcess(words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=said)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (folder / "said").read_text()
        started = json.loads(line)
        with httpx.Client(timeout=SECONDS, verify=False) as http:
            yield SimpleNamespace(
                process=process,
                url=started["url"],
                started=started,
                keys=texts,
                said=folder / "said",
                http=http,
            )
    finally:
        process.kill()


def client_of(api: Any, who: str) -> openai.OpenAI:
    return openai.OpenAI(
        base_url=api.url, api_key=api.keys[who], max_retries=0, timeout=SECONDS, http_client=api.http
    )


def pieces(api: Any, who: str) -> list[str]:
    """The streamed answer of a user's own variant, token by token."""
    stream = client_of(api, who).chat.completions.create(
        model=f"gym-nano:{who}",
        messages=ASK,
        temperature=0,
        max_tokens=24,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return [chunk.choices[0].delta.content or "" for chunk in stream]


def long_stream(api: Any, who: str, max_tokens: int = 200) -> Any:
    return client_of(api, who).completions.create(
        model="gym-nano", prompt="a", max_tokens=max_tokens, stream=True, extra_body={"ignore_eos": True}
    )


def test_the_first_line_names_the_address_and_the_models(api: Any) -> None:
    assert api.started["model"] == "gym-nano"
    assert (api.started["variants"], api.started["api_keys"]) == (2, True)
    assert httpx.get(api.url.removesuffix("/v1") + "/ready").status_code == 200


def test_two_users_at_once_get_their_solo_answers_token_for_token(api: Any) -> None:
    solo = {who: pieces(api, who) for who in ("ann", "bob")}
    assert solo["ann"] != solo["bob"]
    together = threading.Barrier(2)

    def again(who: str) -> list[list[str]]:
        together.wait()
        return [pieces(api, who) for _ in range(2)]

    with ThreadPoolExecutor(2) as pool:
        for who, found in zip(solo, pool.map(again, solo), strict=True):
            assert found == [solo[who]] * 2


def test_another_s_variant_is_the_404_of_an_unknown_name(api: Any) -> None:
    answers = set()
    for name in ("gym-nano:bob", "gym-nano:nobody"):
        with pytest.raises(openai.NotFoundError) as caught:
            client_of(api, "ann").chat.completions.create(model=name, messages=ASK)
        answers.add(caught.value.response.text.replace(name, "NAME"))
    assert len(answers) == 1


def test_an_unsupported_field_is_named(api: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client_of(api, "ann").chat.completions.create(model="gym-nano", messages=ASK, reasoning_effort="low")
    assert caught.value.param == "reasoning_effort"


def test_more_than_may_wait_are_429_with_a_time_to_come_back(api: Any) -> None:
    def ask(_: int) -> str | None:
        try:
            for _chunk in long_stream(api, "ann", 60):
                continue
        except openai.RateLimitError as error:
            return error.response.headers["retry-after"]
        return None

    with ThreadPoolExecutor(6) as pool:
        waits = list(pool.map(ask, range(6)))
    assert None in waits
    refused = [int(seconds) for seconds in waits if seconds is not None]
    assert min(refused) >= 1


def test_a_client_that_leaves_ends_its_generation(api: Any) -> None:
    def cancelled() -> float:
        headers = {"authorization": f"Bearer {api.keys['watcher']}"}
        text = httpx.get(api.url.removesuffix("/v1") + "/metrics", headers=headers).text
        name = 'gym_engine_finished_total{reason="cancelled"} '
        return float(next(line for line in text.splitlines() if line.startswith(name)).removeprefix(name))

    before = cancelled()
    stream = long_stream(api, "bob")
    next(iter(stream))
    stream.close()
    until = time.monotonic() + SECONDS
    while cancelled() == before:
        assert time.monotonic() < until, "the generation went on"
        time.sleep(0.05)


def test_an_evaluation_over_the_api_has_the_answers_of_the_folder(
    api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one key's own limits: the server is full most of the time, and is asked again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANNS_KEY", api.keys["ann"])
    words = ["eval", "gym-nano", "--tasks", "tiny_capital,tiny_arithmetic", "--limit", "3", "--json"]
    found = []
    for more in ([], ["--api", api.url, "--api-key-env", "ANNS_KEY"]):
        done = CliRunner().invoke(app, [*words, *more], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        (run,) = json.loads(done.stdout)["runs"]
        record = read_record(run["file"])
        found.append({name: [one.answer for one in task.samples] for name, task in record.tasks.items()})
        assert run["tasks"]["tiny_capital"]["figures"]["exact_match"]["value"] == 1.0
    assert found[0] == found[1]


def test_what_needs_log_probabilities_of_a_prompt_is_refused_over_the_api_by_task(
    api: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ANNS_KEY", api.keys["ann"])
    words = ["eval", "gym-nano", "--tasks", "tiny_capital,tiny_choice", "--api", api.url]
    done = CliRunner().invoke(app, [*words, "--api-key-env", "ANNS_KEY"])
    assert isinstance(done.exception, GymError)
    assert done.exception.code is ErrorCode.UNAVAILABLE
    assert "which these tasks need: tiny_choice" in done.exception.message


def test_sigterm_lets_answers_finish_refuses_new_ones_and_leaves_with_0(api: Any) -> None:
    stream = iter(long_stream(api, "bob"))
    next(stream)
    api.process.send_signal(signal.SIGTERM)
    ready = api.url.removesuffix("/v1") + "/ready"
    with contextlib.suppress(httpx.TransportError):  # it was too quick for us, and has left
        while api.http.get(ready).status_code == 200:  # until the signal has arrived
            continue
        answer = api.http.post(
            f"{api.url}/completions",
            json={"model": "gym-nano", "prompt": "a"},
            headers={"authorization": f"Bearer {api.keys['ann']}"},
        )
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
    *_, last = stream
    assert last.choices[0].finish_reason == "length"
    assert api.process.wait(SECONDS) == 0
    said = api.said.read_text()
    assert "leaving" in said
    assert not any(key in said for key in api.keys.values())


def test_a_server_that_another_program_started_leaves_with_it() -> None:
    words = [GYM, "api", "--port", "0", "--json", "--until-eof"]
    reading, ours = os.pipe()
    said, theirs = os.pipe()
    with os.fdopen(reading, "rb") as stdin, os.fdopen(theirs, "wb") as stderr:
        process = WarmProcess(words, stdin=stdin, stdout=subprocess.PIPE, stderr=stderr)
    try:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        for end in (said, ours):
            os.close(end)  # as the end of the other program closes them
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()


def test_sigterm_ends_an_answer_that_outlasts_the_drain_with_an_error_and_leaves_with_130(
    tmp_path: Path,
) -> None:
    words = [GYM, "api", "--port", "0", "--json", "--drain-seconds", "0", "--set", "variants=null"]
    with (tmp_path / "said").open("w") as said:
        process = WarmProcess(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=said)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=SECONDS)
        stream = client.completions.create(
            model="gym-nano", prompt="a", max_tokens=400, n=16, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(stream)
        assert process.wait(SECONDS) == 130
    finally:
        process.kill()


def test_sigterm_with_the_defaults_leaves_within_25_seconds() -> None:
    assert DRAIN_SECONDS + LEAVE_SECONDS <= 25


def test_a_process_that_hangs_after_draining_is_ended(tmp_path: Path) -> None:
    program = HANGING.format(seconds=0.2)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, timeout=SECONDS
    )
    assert done.returncode == 130
    assert b"did not stop within" in done.stderr
