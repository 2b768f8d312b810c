"""What somebody without a key, or with one of a viewer, cannot do to the pages and to others who use them."""

from __future__ import annotations

import http.client
import socket
import time
from pathlib import Path

import pytest
from fastapi import APIRouter
from fastapi.testclient import TestClient

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.web import access as web_keys
from gym_fed.web.access import MAX_SESSIONS_OF_KEY, Access, WebKeys
from gym_fed.web.app import MAX_LOGIN_BYTES, Face, create_app
from gym_fed.web.events import Feed
from gym_fed.web.server import WebServer
from tests.support.wait import SECONDS

HERE = "http://10.1.2.3:7000"


@pytest.fixture
def keys(tmp_path: Path) -> WebKeys:
    return WebKeys(tmp_path / "web_keys.json")


@pytest.fixture
def face(tmp_path: Path) -> Face:
    (tmp_path / "index.html").write_text("<!doctype html><head></head>")
    return Face("test", "here", tmp_path, APIRouter(), Feed(lambda last: []))


def opened(face: Face, keys: WebKeys) -> TestClient:
    return TestClient(create_app(face, Access("session", token=None, keys=keys)), HERE)


def visitor(browser: TestClient) -> str | None:
    found: str | None = browser.get("/api/v1/session").json()["visitor"]
    return found


def test_only_an_operators_large_body_is_read(face: Face, keys: WebKeys) -> None:
    secret = keys.add("ann", "viewer")
    browser = opened(face, keys)
    body = b'{"key": "' + b"x" * MAX_LOGIN_BYTES + b'"}'
    headers = {"Content-Type": "application/json"}
    for content in (body, iter([body])):
        assert browser.post("/api/v1/login", content=content, headers=headers).status_code == 413
    assert browser.post("/api/v1/login", json={"key": secret}).status_code == 200
    assert browser.post("/api/v1/login", content=body, headers=headers).status_code == 413


def test_a_session_does_not_pass_on_to_another_key_of_the_name(face: Face, keys: WebKeys) -> None:
    secret = keys.add("otto", "operator")
    thief = opened(face, keys)
    thief.post("/api/v1/login", json={"key": secret})
    assert visitor(thief) == "otto"
    keys.remove("otto")
    keys.add("otto", "operator")
    assert visitor(thief) is None


def test_the_logins_of_one_key_neither_keep_out_nor_end_another(
    face: Face, keys: WebKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewers, operators = keys.add("ann", "viewer"), keys.add("otto", "operator")
    browser = opened(face, keys)
    for _ in range(30):
        keys.find(viewers)
    with pytest.raises(GymError) as refused:
        keys.find(viewers)
    assert refused.value.code is ErrorCode.BUSY
    assert browser.post("/api/v1/login", json={"key": operators}).status_code == 200

    monkeypatch.setattr(web_keys, "_LOGINS_PER_MINUTE", 10**6)
    monkeypatch.setattr(web_keys, "_scrypt", lambda secret, salt: keys.all()[0].scrypt)
    access: Access = browser.app.state.access  # type: ignore[attr-defined]
    first = access.login(viewers)
    for _ in range(MAX_SESSIONS_OF_KEY):
        access.login(viewers)
    assert visitor(browser) == "otto"
    browser.cookies.clear()
    browser.cookies.set("session", first)
    assert visitor(browser) is None, "the viewer's own oldest session ended"


def test_silent_connections_take_no_files_and_keep_nobody_out(face: Face, keys: WebKeys) -> None:
    served = WebServer(face, "127.0.0.1:0", keys=keys, add_key="")
    served.start()
    place = ("127.0.0.1", int(served.address.rpartition(":")[2]))
    silent = []
    try:
        for _ in range(300):
            silent.append(socket.create_connection(place, 5))
        page = http.client.HTTPConnection(*place, timeout=SECONDS)
        page.request("GET", "/")
        assert page.getresponse().status == 200
        until = time.monotonic() + 10
        while _closed(silent) < 300 - 256 and time.monotonic() < until:
            time.sleep(0.1)
        assert _closed(silent) >= 300 - 256
        page.close()
    finally:
        for connection in silent:
            connection.close()
        served.stop()


def _closed(connections: list[socket.socket]) -> int:
    """How many the server has ended."""
    count = 0
    for connection in connections:
        connection.setblocking(False)
        try:
            count += connection.recv(1) == b""
        except BlockingIOError:
            pass
        except ConnectionError:
            count += 1
    return count
