"""`gym chat` with models: through the engine, by transformers' own generation, and over a server's API."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gym_fed.base.models import resolve
from gym_fed.cli.chat.settings import ChatSettings
from gym_fed.cli.main import app
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.chat.local_writer import LocalWriter, open_engine, open_plain
from gym_fed.serving.chat.remote_writer import RemoteWriter
from gym_fed.serving.chat.session import ChatSession
from gym_fed.serving.openai.refusals import RequestError
from tests.support.in_process import run_here
from tests.support.media_models import media_model, sound


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalWriter]:
    writer = open_engine("gym-nano", device="cpu")
    yield writer
    writer.close()


@pytest.fixture(scope="module")
def plain() -> LocalWriter:
    return open_plain("gym-nano", device="cpu")


GREEDY = {"max_tokens": 20, "temperature": 0.0}


def test_engine_and_plain_generation_stream_the_same_answer(engine: LocalWriter, plain: LocalWriter) -> None:
    for writer in (engine, plain):
        conversation = ChatSession(writer, sampling=GREEDY)
        pieces = list(conversation.say("copy: hello"))
        assert "".join(pieces) == "hello"
        assert len(pieces) > 2
        assert conversation.finish_reason == "stop"
        conversation.sampling["max_tokens"] = 2
        assert "".join(conversation.say("copy: hello")) == "he"
        assert conversation.finish_reason == "length"


def test_chat_takes_the_sampling_defaults_of_the_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(resolve("gym-nano"), folder)
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 2.0}')
    words = ["gym", "chat", str(folder), "--prompt", "?!", "--max-tokens", "12", "--device", "cpu", "--json"]

    def answers(*more: str) -> set[str]:
        return {json.loads(run_here([*words, "--seed", str(s), *more]).stdout)["answer"] for s in range(5)}

    assert len(answers()) > 1
    assert len(answers("--temperature", "0")) == 1


def test_the_oldest_turns_go_when_a_models_context_is_full(engine: LocalWriter) -> None:
    conversation = ChatSession(engine, sampling=GREEDY)
    for index in range(9):
        list(conversation.say(f"copy: {index} is a number"))
    assert 2 <= conversation.forgotten < len(conversation.messages) == 18
    with pytest.raises(GymError, match="has room for") as caught:
        list(conversation.say("x" * 300))
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_a_prompt_that_the_engine_alone_finds_too_long_makes_turns_go_too(
    engine: LocalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = ChatSession(engine, sampling=GREEDY)
    list(conversation.say("copy: " + "a" * 60))
    monkeypatch.setattr("gym_fed.data.encoding.prompt_ids", lambda tokenizer, prompt: [0])
    list(conversation.say("x" * 180))
    assert conversation.forgotten == 2
    with pytest.raises(GymError) as caught:
        list(conversation.say("x" * 300))
    assert caught.value.code is ErrorCode.TOO_LARGE


def test_an_adapter_of_virtual_tokens_is_recognised_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}')
    with pytest.raises(GymError, match="PROMPT_TUNING does not change weights") as caught:
        open_engine(str(tmp_path))
    assert caught.value.code is ErrorCode.MODEL_INVALID


def test_an_answer_that_nobody_reads_on_is_stopped(engine: LocalWriter, plain: LocalWriter) -> None:
    threads = threading.active_count()
    for writer in (engine, plain):
        conversation = ChatSession(writer, sampling=GREEDY)
        pieces = conversation.say("copy: hello")
        next(pieces)
        pieces.close()
        assert conversation.messages[-1]["content"]
        assert "".join(conversation.say("copy: you")) == "you"
    assert threading.active_count() == threads


def test_sampling_is_repeatable_by_seed(engine: LocalWriter, plain: LocalWriter) -> None:
    for writer in (engine, plain):
        said = set()
        for seed in (1, 1, 2, 3, 4):
            conversation = ChatSession(writer, sampling={"max_tokens": 12, "temperature": 2.0, "seed": seed})
            said.add("".join(conversation.say("words")))
        assert 2 <= len(said) <= 4


def test_plain_generation_refuses_what_it_cannot_do(plain: LocalWriter) -> None:
    with pytest.raises(GymError, match="presence_penalty is not supported"):
        list(ChatSession(plain, sampling={"presence_penalty": 1.0}).say("hey"))


def test_a_sound_is_heard_by_a_model_of_sound_and_refused_by_name_by_others(
    engine: LocalWriter, plain: LocalWriter, tmp_path: Path
) -> None:
    (tmp_path / "a.wav").write_bytes(sound())
    said = set()
    with closing(open_engine(str(media_model("qwen2_audio", tmp_path / "listener")), device="cpu")) as writer:
        for attached in ([], [tmp_path / "a.wav"]):
            conversation = ChatSession(writer, sampling=GREEDY)
            for file in attached:
                conversation.attach(file)
            said.add("".join(conversation.say("what?")))
        assert len(said) == 2
    for refusing, problem in (
        (engine, "'input_audio' are not supported by this server"),
        (plain, "attachments are supported only"),
    ):
        conversation = ChatSession(refusing, sampling=GREEDY)
        conversation.attach(tmp_path / "a.wav")
        with pytest.raises(GymError, match=problem):
            list(conversation.say("what?"))
        assert conversation.attached.pop()["type"] == "input_audio"
        assert "".join(conversation.say("copy: hello")) == "hello"


def test_old_turns_are_dropped_if_their_attachments_fill_the_context(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(sound())
    with closing(open_engine(str(media_model("qwen2_audio", tmp_path / "listener")), device="cpu")) as writer:
        conversation = ChatSession(writer, sampling=GREEDY)
        conversation.attach(tmp_path / "a.wav")
        list(conversation.say("what?"))
        writer._context = 1 + writer._length({"messages": conversation.messages})
        count = writer._count

        def limited(messages: list[dict[str, Any]]) -> int:
            if (length := count(messages)) >= writer._context:
                raise RequestError("the prompt is too long", name="context_length_exceeded")
            return length

        writer._count = limited
        conversation.attach(tmp_path / "a.wav")
        list(conversation.say("and?"))
        assert conversation.forgotten == 2


def test_a_model_that_the_engine_cannot_serve_answers_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> LocalWriter:
        raise GymError(ErrorCode.MODEL_INVALID, "RoutedModel cannot be served: no cache")

    monkeypatch.setattr("gym_fed.serving.chat.local_writer.open_engine", refuse)
    done = CliRunner().invoke(app, ["chat", "gym-nano", "--prompt", "copy: hello", "--json"])
    assert json.loads(done.stdout)["answer"] == "hello"
    assert "RoutedModel cannot be served" in done.stderr
    asked = CliRunner().invoke(app, ["chat", "gym-nano", "--prompt", "x", "--variant", "ada"])
    assert isinstance(asked.exception, GymError)
    assert asked.exception.code is ErrorCode.MODEL_INVALID


def test_a_folder_without_variants_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(GymError, match="no variant store") as caught:
        open_engine("gym-nano", variants=tmp_path / "none")
    assert caught.value.code is ErrorCode.FILE_NOT_FOUND
    assert not (tmp_path / "none").exists()


@pytest.mark.shared
def test_a_model_without_template_continues_the_text(shared_folder: Path) -> None:
    writer = open_engine(str(shared_folder / "models/stories260K"), device="cpu")
    conversation = ChatSession(writer, sampling=GREEDY)
    assert len("".join(conversation.say("Once upon a time")).split()) > 3
    assert conversation.messages == []
    writer.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["chat"], "MODEL is missing"),
        (
            ["chat", "--api", "http://127.0.0.1:1", "--device", "cpu"],
            "--device cannot be combined with --api",
        ),
        (
            ["chat", "--api", "http://127.0.0.1:1", "--variants", "x"],
            "--variants cannot be combined with --api",
        ),
        (["chat", "gym-nano", "--api-key-env", "KEY"], "--api-key-env applies only with --api"),
        (["chat", "--api", "http://127.0.0.1:1", "--api-key-env", "NOT_SET_AT_ALL"], "is not set"),
        (["chat", "--api", "127.0.0.1"], "is not a URL"),
        (["chat", "gym-nano", "--set", "top_p=2"], "top_p"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, GymError)
    assert message in done.exception.message


# ---- a server ----


class Stub(ThreadingHTTPServer):
    """Answers `POST /v1/chat/completions` as ``answer`` says: a status, headers and bytes."""

    answer: Callable[[dict[str, Any]], tuple[int, dict[str, str], bytes]]
    asked: list[dict[str, Any]]
    names: tuple[str, ...] = ("nano", "nano:ada", "nano:ben")


class _Handler(BaseHTTPRequestHandler):
    server: Stub

    def do_GET(self) -> None:
        if self.headers["Authorization"] != "Bearer secret":
            self._send(401, {}, b'{"error": {"message": "who are you?", "code": "invalid_api_key"}}')
            return
        names = [{"id": name} for name in self.server.names]
        self._send(200, {}, json.dumps({"data": names}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append({"path": self.path, **body})
        self._send(*self.server.answer(body))

    def _send(self, status: int, headers: dict[str, str], data: bytes) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Nothing is logged."""


def events(*texts: str, end: str = "data: [DONE]\n\n") -> bytes:
    chunks = [{"choices": [{"delta": {"content": text}}]} for text in texts]
    return (": a comment\n\n" + "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + end).encode()


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub(("127.0.0.1", 0), _Handler)
    server.asked = []
    server.answer = lambda body: (200, {}, events("h", "ey"))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def remote(stub: Stub, model: str | None = None, key: str = "secret") -> RemoteWriter:
    return RemoteWriter(f"http://127.0.0.1:{stub.server_port}", model, api_key=key)


def test_a_server_is_talked_to_as_openais_clients_do(stub: Stub) -> None:
    writer = remote(stub)
    assert (writer.base, writer.variants()) == ("nano", ["ada", "ben"])
    conversation = ChatSession(writer, variant="ben", sampling={"temperature": 0.5})
    assert list(conversation.say("hello")) == ["h", "ey"]
    asked = stub.asked[0]
    assert (asked["path"], asked["model"]) == ("/v1/chat/completions", "nano:ben")
    assert (asked["temperature"], asked["stream"]) == (0.5, True)
    writer.close()


def test_a_servers_context_makes_the_oldest_turns_go(stub: Stub) -> None:
    refusal = b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'
    stub.answer = lambda body: (400, {}, refusal) if len(body["messages"]) > 3 else (200, {}, events("x"))
    conversation = ChatSession(remote(stub))
    for _ in range(3):
        list(conversation.say("hello"))
    assert conversation.forgotten == 2


@pytest.mark.parametrize(
    ("status", "headers", "data", "code", "message"),
    [
        (
            429,
            {"Retry-After": "7"},
            b'{"error": {"message": "busy"}}',
            ErrorCode.BUSY,
            "try again in 7 seconds",
        ),
        (
            503,
            {"Retry-After": "Fri, 1 Jan 2027"},
            b"{}",
            ErrorCode.UNAVAILABLE,
            "try again at Fri, 1 Jan 2027",
        ),
        (404, {}, b'{"error": {"message": "gone", "code": "model_not_found"}}', ErrorCode.NOT_FOUND, "gone"),
        (409, {}, b'{"error": {"message": "no", "code": "base_mismatch"}}', ErrorCode.BASE_MISMATCH, "no"),
        (400, {}, b'{"error": {"message": "no top_k here"}}', ErrorCode.USAGE, "no top_k here"),
        (500, {}, b"<html>", ErrorCode.UNAVAILABLE, "<html>"),
        (200, {}, events("h", end=""), ErrorCode.UNAVAILABLE, "cut off"),
        (200, {}, b"data: {\n\n", ErrorCode.UNAVAILABLE, "invalid JSON"),
        (200, {}, b'data: {"error": {"message": "engine"}}\n\n', ErrorCode.UNAVAILABLE, "engine"),
    ],
)
def test_a_servers_refusals_keep_their_meaning(
    status: int, headers: dict[str, str], data: bytes, code: ErrorCode, message: str, stub: Stub
) -> None:
    stub.answer = lambda body: (status, headers, data)
    with pytest.raises(GymError) as caught:
        list(ChatSession(remote(stub)).say("hello"))
    assert caught.value.code is code
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("names", "base"),
    [
        (("llama3:latest",), "llama3:latest"),
        (("llama3:latest", "qwen3:8b"), None),
        (("a", "b"), None),
        ((), None),
    ],
)
def test_the_one_model_of_a_server_needs_no_name(
    names: tuple[str, ...], base: str | None, stub: Stub
) -> None:
    stub.names = names
    if base is not None:
        assert (remote(stub).base, remote(stub).variants()) == (base, [])
        return
    with pytest.raises(GymError, match="has no default model") as caught:
        remote(stub)
    assert all(name in caught.value.hint for name in names)


def test_keys_and_names_that_a_server_does_not_know_are_reported(stub: Stub) -> None:
    with pytest.raises(GymError, match="who are you") as caught:
        remote(stub, key="wrong")
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    with pytest.raises(GymError, match="has no model 'eve'"):
        remote(stub, "eve")
    with pytest.raises(GymError, match="is the server running") as caught:
        RemoteWriter("http://127.0.0.1:1/v1")
    assert caught.value.code is ErrorCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("text", "stop"),
    [("stop=###", ["###"]), ("stop=User:", ["User:"]), ("stop=[a, b]", ["a", "b"]), ("stop=none", None)],
)
def test_a_stop_text_is_taken_literally(text: str, stop: list[str] | None) -> None:
    assert ChatSettings().changed(text).stop == stop
