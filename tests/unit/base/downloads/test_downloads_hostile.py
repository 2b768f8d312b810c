"""A Hub or mirror that is hostile: endless bodies, endless waits, marks for the terminal, other hosts."""

from __future__ import annotations

import gzip
import json
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from gym_fed.base.downloads import ensure_model, missing_model
from gym_fed.base.downloads import hub as hub_requests
from gym_fed.base.downloads.offer import offer_model
from gym_fed.core.errors import ErrorCode, GymError
from tests.support.model_hub import ModelHub, Repo
from tests.support.wait import SECONDS
from tests.unit.base.downloads.conftest import NAME
from tests.unit.base.downloads.test_downloads import WEIGHTS, yes

MIB = 1 << 20


@contextmanager
def answering(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The address of a server that gives ``answer`` to everything."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.close_connection = True
            try:
                answer(self)
            except OSError:  # the other end hung up
                return

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def refused(url: str, monkeypatch: pytest.MonkeyPatch) -> GymError:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    with pytest.raises(GymError) as raised:
        offer_model(NAME)
    return raised.value


@pytest.mark.parametrize("status", [200, 404, 500])
def test_an_endless_body_is_not_taken_into_memory(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []

    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        handler.end_headers()
        for _ in range(200):
            sent.append(handler.wfile.write(b"x" * MIB))

    monkeypatch.setattr(hub_requests, "MAX_INFO_BYTES", 2 * MIB)
    with answering(endless) as url:
        tracemalloc.start()
        error = refused(url, monkeypatch)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert error.code is (ErrorCode.TOO_LARGE if status == 200 else ErrorCode.UNAVAILABLE)
    assert peak < 40 * MIB


def test_a_body_that_unpacks_to_gigabytes_is_not_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = gzip.compress(gzip.compress(gzip.compress(b"\0" * (64 * MIB))))

    def packed(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip, gzip, gzip")
        handler.send_header("Content-Length", str(len(bomb)))
        handler.end_headers()
        handler.wfile.write(bomb)

    with answering(packed) as url:
        tracemalloc.start()
        error = refused(url, monkeypatch)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "returned an invalid description of it" in error.message
    assert peak < 10 * MIB


def test_a_body_in_drops_ends_after_a_stated_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def drops(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        for _ in range(4_000):
            handler.wfile.write(b" ")
            time.sleep(0.05)

    monkeypatch.setattr(hub_requests, "READ_SECONDS", 0.5)
    with answering(drops) as url:
        began = time.monotonic()
        error = refused(url, monkeypatch)
    assert error.code is ErrorCode.DEADLINE_EXCEEDED
    assert url in error.message
    assert time.monotonic() - began < 100, "the body takes 200 s"


def test_a_hub_that_says_to_come_back_tomorrow_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def tomorrow(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(429)
        handler.send_header("Retry-After", "86400")
        handler.send_header("RateLimit", '"api";r=0;t=86400')
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with answering(tomorrow) as url:
        began = time.monotonic()
        assert refused(url, monkeypatch).code is ErrorCode.BUSY
    assert time.monotonic() - began < SECONDS


def test_headers_of_a_refusal_reach_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def marked(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(404)
        handler.send_header("X-HF-Warning", "topic; \x1b[31mpay here")
        handler.send_header("X-Error-Message", "\x1b[31mpay here")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with answering(marked) as url:
        error = refused(url, monkeypatch)
    shown = capfd.readouterr()
    assert "pay here" not in shown.out + shown.err + str(error)


def test_a_token_does_not_follow_a_redirect_to_another_host(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens: list[str | None] = []

    def take(handler: BaseHTTPRequestHandler) -> None:
        tokens.append(handler.headers.get("Authorization"))
        handler.send_response(404)
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with answering(take) as other:

        def redirect(handler: BaseHTTPRequestHandler) -> None:
            tokens.append(handler.headers.get("Authorization"))
            handler.send_response(302)
            handler.send_header("Location", f"{other}/elsewhere")
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        with answering(redirect) as url:
            error = refused(url, monkeypatch)
    assert tokens == ["Bearer hf_secret", None]
    assert "hf_secret" not in str(error)


def test_a_redirect_to_a_file_of_this_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def redirect(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(302)
        handler.send_header("Location", "file:///etc/hostname")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with answering(redirect) as url:
        assert "unsupported protocol" in refused(url, monkeypatch).message


def test_nothing_but_the_model_is_requested(hub: ModelHub) -> None:
    offer_model(NAME)
    assert {path for _, path, _ in hub.requests} == {
        f"/api/models/{NAME}",
        f"/{NAME}/resolve/{hub.repos[NAME].commit}/config.json",
    }


def test_a_config_that_is_shown_before_the_offer_is_the_one_that_is_fetched(
    hub: ModelHub, repo: Repo
) -> None:
    shown = repo.files["config.json"]
    repo.files["config.json"] = json.dumps({"model_type": "tinyzilla"}).encode()
    repo.sent["config.json"] = shown
    with pytest.raises(GymError) as raised:
        offer_model(NAME)
    assert raised.value.code is ErrorCode.HASH_MISMATCH
    assert "config.json" in raised.value.message


def test_a_transfer_that_begins_again_and_again_ends(
    hub: ModelHub, repo: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_fed.base.downloads.fetch.RETRY_SECONDS", 0.0)
    repo.cut[WEIGHTS] = [2000] + [0] * 100
    with pytest.raises(GymError) as raised:
        ensure_model(NAME, consent=yes)
    assert raised.value.code is ErrorCode.UNAVAILABLE
    assert len(hub.gets(WEIGHTS)) < 10
    assert missing_model(NAME)


def test_a_mirror_without_ranges_starts_a_file_anew(hub: ModelHub, repo: Repo, tmp_path: Path) -> None:
    digest = next(file.digest for file in offer_model(NAME).files if file.path == WEIGHTS)
    blobs = tmp_path / "cache" / "models--acme--tiny-chat" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest}.incomplete").write_bytes(repo.files[WEIGHTS][:4000])
    repo.ranges = False
    folder = ensure_model(NAME, consent=yes)
    assert hub.gets(WEIGHTS) == ["bytes=4000-"]
    assert (folder / WEIGHTS).read_bytes() == repo.files[WEIGHTS]
