"""The routes of `play` with a server of models that is not there, is loading, refuses, or answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient

from gym_fed.web.jobs import Jobs
from gym_fed.web.model_server import ModelServer
from gym_fed.webui.inventory import ModelServers
from tests.support.wait import until
from tests.support.webui_client import webui_client

pytestmark = pytest.mark.usefixtures("warm_children")

API = "/api/v1/play"
EVENTS = b'data: {"choices": [{"delta": {"content": "<b>hi"}}]}\n\ndata: [DONE]\n\n'


class FakeApi(BaseHTTPRequestHandler):
    """Keeps what it was asked, and answers with ``EVENTS``, or refuses the model ``base:other``."""

    asked: list[tuple[str, dict[str, Any]]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.headers["authorization"], body))
        is_other = body["model"] == "base:other"
        data = json.dumps({"error": {"message": "no such variant"}}).encode() if is_other else EVENTS
        self.send_response(404 if is_other else 200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "home"))
    return webui_client(tmp_path)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeApi]]:
    FakeApi.asked = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeApi)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    loaded = SimpleNamespace(url=f"http://127.0.0.1:{server.server_port}/v1", key="gym-secret")
    monkeypatch.setattr(ModelServers, "ready", lambda self, base: loaded)
    yield FakeApi
    server.shutdown()


def prompt(**more: Any) -> dict[str, Any]:
    return {"base": "gym-nano", "messages": [{"role": "user", "content": "hello"}], **more}


def test_an_answer_is_passed_on_as_it_comes_and_the_key_stays_here(
    client: TestClient, api: type[FakeApi]
) -> None:
    answer = client.post(API + "/chat", json=prompt(variant="ada", seed=3, logprobs=True, max_tokens=9))
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.content == EVENTS
    [(authorization, body)] = api.asked
    assert authorization == "Bearer gym-secret"
    assert (body["model"], body["seed"], body["top_logprobs"], body["max_tokens"]) == ("base:ada", 3, 5, 9)
    assert body["stream"] is True
    assert "gym-secret" not in client.get(API).text


def test_a_refusal_of_the_server_comes_as_the_stream_s_error(client: TestClient, api: type[FakeApi]) -> None:
    answer = client.post(API + "/chat", json=prompt(variant="other"))
    assert json.loads(answer.text.removeprefix("data: "))["error"]["message"] == "no such variant"


def test_a_model_that_is_not_loaded_is_refused_by_name(client: TestClient) -> None:
    refused = client.post(API + "/chat", json=prompt())
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "gym-nano is not loaded"


def test_a_path_that_is_not_listed_is_never_loaded(client: TestClient, tmp_path: Path) -> None:
    for base in ("/etc", "../x", "--help", str(tmp_path)):
        assert client.post(API + "/serve", json={"bases": [base]}).status_code == 404
    assert client.post(API + "/serve", json={"bases": ["a", "b", "c"]}).status_code == 400


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": 3},
        {"max_tokens": 0},
        {"seed": -1},
        {"variant": "../x"},
        {"messages": []},
        {"messages": [{"role": "tool", "content": ""}]},
        {"key": "x"},
    ],
    ids=str,
)
def test_a_wrong_field_of_a_prompt_is_named(
    client: TestClient, api: type[FakeApi], field: dict[str, Any]
) -> None:
    refused = client.post(API + "/chat", json=prompt(**field))
    assert refused.status_code == 400
    assert next(iter(field)) in refused.json()["error"]["message"]
    assert not api.asked


def test_what_is_taught_is_counted_shown_and_removed(client: TestClient, tmp_path: Path) -> None:
    taught = {"base": "runs/a b", "prompt": [{"role": "user", "content": "q"}]}
    assert client.post(API + "/taught", json={**taught, "chosen": "yes", "rejected": "no"}).json() == {
        "total": 1
    }
    system = [{"role": "system", "content": "s"}, *taught["prompt"]]  # type: ignore[misc]
    given = {**taught, "prompt": system, "chosen": "A", "rejected": "B"}
    assert client.post(API + "/taught", json=given).json() == {"total": 2}
    found = client.get(API + "/taught", params={"base": "runs/a b"}).json()
    assert [row["prompt"] for row in found["rows"]] == [system, "q"]
    assert (tmp_path / found["file"]).read_text().count("\n") == 2
    left = client.delete(API + "/taught", params={"base": "runs/a b", "id": found["rows"][0]["id"]})
    assert left.json() == {"total": 1}
    assert client.delete(API + "/taught", params={"base": "runs/a b", "id": "0" * 16}).status_code == 404
    assert client.get(API + "/taught", params={"base": "runs/a-b"}).json()["total"] == 0


def test_so_many_answers_are_taught_and_no_more(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gym_fed.webui.play.MAX_TAUGHT_ROWS", 1)
    row = {"base": "gym-nano", "prompt": [{"role": "user", "content": "hi"}], "chosen": "a", "rejected": "b"}
    assert client.post(API + "/taught", json=row).json() == {"total": 1}
    refused = client.post(API + "/taught", json={**row, "chosen": "c"})
    assert refused.json()["error"]["code"] == "quota-exceeded"


def test_an_answer_that_is_no_better_teaches_nothing(client: TestClient, tmp_path: Path) -> None:
    same = {"base": "x", "prompt": [{"role": "user", "content": "q"}], "chosen": "a", "rejected": "a"}
    assert client.post(API + "/taught", json=same).status_code == 422
    assert not (tmp_path / "taught").exists()


def test_the_command_of_a_variant_is_shown_and_starts_as_a_job(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = client.get(API + "/variant-command", params={"base": "gym-nano", "name": "ada"}).json()["command"]
    assert shown == "gym variant create --data=taught/gym-nano.jsonl --user=ada --base=gym-nano"
    begun: list[list[str]] = []

    def start(jobs: Jobs, command: list[str], *, title: str) -> Any:
        begun.append(command)
        return SimpleNamespace(facts=lambda: {"id": "1"})

    monkeypatch.setattr(Jobs, "start", start)
    assert client.post(API + "/variant", json={"base": "gym-nano", "name": "ada"}).json() == {"id": "1"}
    assert " ".join(begun[0]) == shown
    assert client.post(API + "/variant", json={"base": "gym-nano", "name": "--ada"}).status_code == 400
    assert client.post(API + "/variant", json={"base": "/etc", "name": "ada"}).status_code == 404


def test_nothing_is_asked_or_taught_without_the_page_s_token(client: TestClient) -> None:
    del client.headers["X-CSRF-Token"]
    for path, body in (
        ("chat", prompt()),
        ("serve", {"bases": []}),
        ("variant", {"base": "gym-nano", "name": "a"}),
    ):
        assert client.post(f"{API}/{path}", json=body).status_code == 403
    assert client.delete(API + "/taught", params={"base": "x", "id": "y"}).status_code == 403


def test_a_server_that_cannot_start_says_why_in_its_output(tmp_path: Path) -> None:
    server = ModelServer(str(tmp_path / "absent"), tmp_path, None)
    try:
        until(lambda: server.status == "failed", "the end of the server")
        assert any(line.startswith("error (model-not-found): ") for line in server.facts()["output"])
    finally:
        server.stop()
