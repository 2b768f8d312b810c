"""`play` with a real `gym api` behind it: gym-nano streams, a stop cancels, a failure shows, and all end together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from gym_fed.serving.http.keys import KeyFile
from gym_fed.web.access import CSRF_HEADER
from gym_fed.web.model_server import ModelServer
from gym_fed.webui.app import open_webui
from gym_fed.webui.workbench import open_workbench
from tests.support.nano_store import nano_store
from tests.support.wait import SECONDS, until

LONG: dict[str, Any] = {
    "base": "gym-nano",
    "messages": [{"role": "user", "content": "Reverse: abc"}],
    "max_tokens": 1000,
    "temperature": 2.0,
}
"""Sampled so hot that it goes on."""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[httpx.Client]:
    """A page that has logged in; the models end with the test."""
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    nano_store(tmp_path / "home" / "variants", ["ann"])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    server = open_webui(open_workbench(tmp_path, tmp_path / "runs"), "127.0.0.1:0", "bench")
    server.start()
    with httpx.Client(base_url=server.address, timeout=SECONDS, verify=False) as client:
        client.get(server.url.removeprefix(server.address))
        client.headers[CSRF_HEADER] = client.get("/api/v1/session").json()["csrf"]
        yield client
        client.post("/api/v1/play/serve", json={"bases": []})
    server.stop()


def serve(page: httpx.Client, *bases: str) -> list[dict[str, Any]]:
    """Have these loaded; returns once none is loading."""
    assert page.post("/api/v1/play/serve", json={"bases": bases}).status_code == 200

    def settled() -> list[dict[str, Any]]:
        servers = page.get("/api/v1/play").json()["servers"]
        return servers if all(one["status"] != "loading" for one in servers) else []

    return until(settled, "loading")


def texts(lines: Iterator[str]) -> Iterator[str]:
    """The pieces of an answer."""
    for line in lines:
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]


@pytest.mark.slow  # trains a variant and serves it; tests/browser does so too
def test_gym_nano_and_a_variant_answer_in_pieces_and_a_stop_cancels(
    page: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ModelServer] = []
    begin = ModelServer.__init__

    def noted(self: ModelServer, *arguments: Any) -> None:
        begin(self, *arguments)
        made.append(self)

    monkeypatch.setattr(ModelServer, "__init__", noted)
    [loaded] = serve(page, "gym-nano")
    assert loaded["status"] == "ready", loaded["output"]
    assert httpx.get(f"{made[0].url}/models", verify=False).status_code == 401  # another program has no key

    def ask(**more: Any) -> str:
        with page.stream("POST", "/api/v1/play/chat", json={**LONG, "max_tokens": 8, **more}) as response:
            return "".join(texts(response.iter_lines()))

    assert ask(seed=5) == ask(seed=5) != ""
    assert ask(variant="ann")

    keys = KeyFile(Path(made[0]._private.name) / "api_keys.json")
    watcher = {"authorization": f"Bearer {keys.add('watcher', base=False, metrics=True)}"}

    def cancelled() -> bool:
        text = httpx.get(made[0].url.removesuffix("/v1") + "/metrics", headers=watcher, verify=False).text
        return 'gym_engine_finished_total{reason="cancelled"} 1' in text

    with page.stream("POST", "/api/v1/play/chat", json=LONG) as response:
        assert next(texts(response.iter_lines()))
    until(cancelled, "the end of an answer that nobody reads")

    process = psutil.Process(made[0]._process.pid)
    [broken] = serve(page, "broken")
    assert broken["status"] == "failed"
    assert "broken" in "\n".join(broken["output"])
    until(lambda: not process.is_running(), "the end of the model before")


@pytest.mark.slow  # two servers of models
def test_two_models_are_loaded_to_be_compared_and_no_key_or_prompt_is_printed(page: httpx.Client) -> None:
    servers = serve(page, "gym-nano", "broken")
    assert [one["status"] for one in servers] == ["ready", "failed"]
    with page.stream("POST", "/api/v1/play/chat", json={**LONG, "max_tokens": 2}) as response:
        assert "".join(texts(response.iter_lines()))
    output = json.dumps(page.get("/api/v1/play").json())
    assert "Reverse" not in output
    assert "gym-api" not in output
