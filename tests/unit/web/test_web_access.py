"""Who may see and do what: logins, keys, sessions, and the checks on every request of both faces."""

from __future__ import annotations

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest
from fastapi import APIRouter
from fastapi.testclient import TestClient

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http import key_ring
from gym_fed.serving.http.key_ring import MAX_FILE_BYTES, MAX_KEYS
from gym_fed.serving.http.proxies import BehindProxy, Proxies
from gym_fed.web import access as web_keys
from gym_fed.web.access import (
    MAX_SESSIONS,
    MAX_SESSIONS_OF_KEY,
    SESSION_SECONDS,
    Access,
    Role,
    Visitor,
    WebKeys,
)
from gym_fed.web.app import HEADERS, MAX_BODY_BYTES, Changing, Face, Looking, Measuring, Operating, create_app
from gym_fed.web.events import Feed
from gym_fed.web.server import WebServer

HERE = "http://127.0.0.1:7000"
SECRET = "the-token-of-the-url"


@pytest.fixture
def keys(tmp_path: Path) -> WebKeys:
    return WebKeys(tmp_path / "web_keys.json")


@pytest.fixture
def screens(tmp_path: Path) -> Path:
    folder = tmp_path / "screens"
    folder.mkdir()
    (folder / "index.html").write_text("<!doctype html><title>here</title>")
    (folder / "home.js").write_text("export const title = 'Home';")
    (tmp_path / "secret.txt").write_text("never served")
    return folder


def routes() -> APIRouter:
    found = APIRouter()

    @found.get("/look")
    def look(visitor: Looking) -> dict[str, Any]:
        return {"visitor": visitor.name}

    @found.get("/operate")
    def operate(visitor: Operating) -> dict[str, Any]:
        return {"visitor": visitor.name}

    @found.get("/measure")
    def measure(visitor: Measuring) -> dict[str, Any]:
        return {"visitor": visitor.name}

    @found.post("/change")
    def change(visitor: Changing, body: dict[str, Any]) -> dict[str, Any]:
        return {"changed": visitor.name}

    @found.get("/defect")
    def defect(visitor: Looking) -> dict[str, Any]:
        raise RuntimeError("password=hunter2")

    return found


def opened(screens: Path, base: str = HERE, **access: Any) -> TestClient:
    """A browser in front of a face."""
    given = Access("gym_test_7000", **{"token": SECRET, **access})
    face = Face("test", "a <title>", screens, routes(), Feed(lambda last: []))
    return TestClient(create_app(face, given), base, follow_redirects=False, raise_server_exceptions=False)


def csrf(browser: TestClient) -> dict[str, str]:
    return {"X-CSRF-Token": browser.get("/api/v1/session").json()["csrf"]}


def code(response: Any) -> str:
    return str(response.json()["error"]["code"])


def test_the_printed_url_logs_in_and_leaves_no_token_in_the_address(screens: Path) -> None:
    browser = opened(screens)
    assert browser.get("/api/v1/look").status_code == 401
    answer = browser.get(f"/login?token={SECRET}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert browser.get("/api/v1/look").json() == {"visitor": "token"}
    cookie = answer.headers["set-cookie"]
    for flag in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age="):
        assert flag in cookie
    assert "Secure" not in cookie
    assert SECRET not in cookie
    assert "Domain" not in cookie


def test_a_login_from_a_file_redirects_by_a_page_since_its_cookie_is_strict(screens: Path) -> None:
    browser = opened(screens)
    answer = browser.get(f"/login?token={SECRET}", headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 200
    assert 'content="0; url=/"' in answer.text
    assert SECRET not in answer.text
    assert browser.get("/api/v1/look").json() == {"visitor": "token"}


def test_a_cookie_under_tls_is_for_tls_alone(screens: Path) -> None:
    browser = opened(screens, base="https://127.0.0.1:7000")
    assert "; Secure" in browser.get(f"/login?token={SECRET}").headers["set-cookie"]


@pytest.mark.parametrize("token", ["wrong", "x" * 5000, "\u0000", SECRET + "x", "ü"])
def test_a_wrong_token_is_refused_and_begins_no_session(token: str, screens: Path) -> None:
    browser = opened(screens)
    answer = browser.get("/login", params={"token": token})
    assert (answer.status_code, code(answer)) == (401, "unauthenticated")
    assert not browser.cookies
    assert browser.get("/api/v1/session").json()["visitor"] is None


def test_a_key_logs_in_with_its_role_until_it_is_removed(screens: Path, keys: WebKeys) -> None:
    looks, works = keys.add("vera", "viewer"), keys.add("otto", "operator")
    assert looks not in keys.path.read_text()
    assert keys.path.stat().st_mode & 0o777 == 0o600
    viewer, operator = (opened(screens, keys=keys, token=None) for _ in range(2))
    assert viewer.post("/api/v1/login", json={"key": looks}).status_code == 200
    assert operator.post("/api/v1/login", json={"key": works}).status_code == 200
    assert viewer.get("/api/v1/look").json() == {"visitor": "vera"}
    assert operator.get("/api/v1/operate").json() == {"visitor": "otto"}
    assert code(viewer.get("/api/v1/operate")) == "permission-denied"
    keys.remove("vera")
    assert viewer.get("/api/v1/look").status_code == 401
    assert operator.get("/api/v1/look").status_code == 200
    keys.remove("otto")
    keys.add("otto", "viewer")
    assert operator.get("/api/v1/look").status_code == 401, "the session had another role"


def test_changing_takes_an_operator_and_the_token_of_the_session(screens: Path, keys: WebKeys) -> None:
    browser = opened(screens, keys=keys)
    browser.get(f"/login?token={SECRET}")
    other = opened(screens)
    other.get(f"/login?token={SECRET}")
    right = csrf(browser)
    for wrong in ({}, {"X-CSRF-Token": ""}, {"X-CSRF-Token": "ü".encode()}, csrf(other)):
        answer = browser.post("/api/v1/change", json={}, headers=wrong)  # type: ignore[arg-type]
        assert (answer.status_code, code(answer)) == (403, "permission-denied")
    assert browser.post("/api/v1/change", json={}, headers=right).json() == {"changed": "token"}


def test_a_viewer_changes_nothing(screens: Path, keys: WebKeys) -> None:
    secret = keys.add("vera", "viewer")
    for browser in (opened(screens, keys=keys), opened(screens, public=True)):
        if not browser.app.state.access.public:  # type: ignore[attr-defined]
            browser.post("/api/v1/login", json={"key": secret})
        about = browser.get("/api/v1/session").json()
        assert (about["role"], about["csrf"]) == ("viewer", "")
        for headers in ({}, {"X-CSRF-Token": ""}):
            answer = browser.post("/api/v1/change", json={}, headers=headers)
            assert (answer.status_code, code(answer)) == (403, "permission-denied")


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "hub.local:7000", "[", "a" * 300]
)
def test_without_keys_another_host_is_refused(host: str, screens: Path) -> None:
    browser = opened(screens)
    for path in ("/", "/api/v1/session", f"/login?token={SECRET}", "/static/app.js"):
        answer = browser.get(path, headers={"Host": host})
        assert (answer.status_code, code(answer)) == (403, "permission-denied")


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://127.0.0.1:7001", "http://127.0.0.1", "http://[", ""]
)
def test_a_page_of_another_site_is_refused(origin: str, screens: Path) -> None:
    browser = opened(screens)
    browser.get(f"/login?token={SECRET}")
    answer = browser.post("/api/v1/change", json={}, headers={**csrf(browser), "Origin": origin})
    assert (answer.status_code, code(answer)) == (403, "permission-denied")
    assert (
        browser.post("/api/v1/change", json={}, headers={**csrf(browser), "Origin": HERE}).status_code == 200
    )


def test_every_response_has_the_headers_that_keep_scripts_out(screens: Path) -> None:
    browser = opened(screens)
    answers = [
        browser.get("/"),
        browser.get("/static/app.js"),
        browser.get("/screens/home.js"),
        browser.get("/api/v1/look"),
        browser.get("/api/v1/nothing"),
        browser.get("/", headers={"Host": "evil.example"}),
        browser.post("/api/v1/login", json={"other": 1}),
        browser.request("TRACE", "/api/v1/session"),
    ]
    browser.get(f"/login?token={SECRET}")
    answers.append(browser.get("/api/v1/defect"))
    assert answers[-1].status_code == 500
    for answer in answers:
        for name, value in HEADERS.items():
            assert answer.headers.get(name) == value, answer.url
    policy = HEADERS["Content-Security-Policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answers[3].headers["Cache-Control"] == "no-store"


def test_the_answer_to_a_defect_says_nothing_of_the_defect(screens: Path) -> None:
    browser = opened(screens)
    browser.get(f"/login?token={SECRET}")
    answer = browser.get("/api/v1/defect")
    assert (answer.status_code, code(answer)) == (500, "internal")
    assert "hunter2" not in answer.text


def test_a_large_body_is_refused_whatever_it_declares(screens: Path) -> None:
    browser = opened(screens)
    browser.get(f"/login?token={SECRET}")
    headers = {**csrf(browser), "Content-Type": "application/json"}
    large = b" " * (MAX_BODY_BYTES + 1)
    assert browser.post("/api/v1/change", content=large, headers=headers).status_code == 413
    streamed = browser.post("/api/v1/change", content=iter([large[:70000]] * 70), headers=headers)
    assert streamed.status_code == 413
    for length in ("-1", "1e9", "9" * 20):
        answer = browser.post("/api/v1/change", content=b"{}", headers={**headers, "Content-Length": length})
        assert answer.status_code == 413, length


@pytest.mark.parametrize(
    "path",
    [
        "/static/../secret.txt",
        "/screens/../secret.txt",
        "/screens/..%2fsecret.txt",
        "/screens/%2e%2e/secret.txt",
        "/screens//etc/passwd",
        "/static/%2e%2e%2f%2e%2e%2fpyproject.toml",
        "/screens/%00",
        "/static/..\\..\\app.py",
    ],
)
def test_no_path_leaves_the_folders_that_are_served(path: str, screens: Path) -> None:
    answer = opened(screens).get(path)
    assert "never served" not in answer.text
    assert "root:" not in answer.text
    assert answer.status_code in (400, 404) or answer.text == (screens / "index.html").read_text()


def test_unknown_paths_of_the_api_are_not_pages(screens: Path) -> None:
    browser = opened(screens)
    for path in ("/api/v1/nothing", "/api/", "/static/nothing.js", "/screens/nothing.js"):
        answer = browser.get(path)
        assert (answer.status_code, code(answer)) == (404, "not-found")
    assert browser.get("/rounds/7").text.startswith("<!doctype html>")


def test_many_logins_are_throttled_and_a_wrong_key_costs_no_hash(
    keys: WebKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = keys.add("otto", "operator")
    hashed: list[str] = []

    def hashing(given: str, salt: bytes) -> str:
        hashed.append(given)
        return "0" * 64

    monkeypatch.setattr(web_keys, "_scrypt", hashing)
    for number in range(100):
        assert keys.find(f"gymweb-{number:064x}") is None
    assert not hashed
    for _ in range(30):
        assert keys.find(secret[:20] + "0" * 50) is None
    with pytest.raises(GymError) as refused:
        keys.find(secret)
    assert refused.value.code is ErrorCode.BUSY
    assert len(hashed) == 30


def test_the_key_names_of_other_visitors_and_strange_ones_are_refused(keys: WebKeys) -> None:
    keys.add("ann", "viewer")
    for name in ("token", "public", "", "a b", "<b>", "../x", "x" * 65):
        with pytest.raises(GymError) as refused:
            keys.add(name, "viewer")
        assert refused.value.code is ErrorCode.USAGE
    with pytest.raises(GymError) as taken:
        keys.add("ann", "viewer")
    assert taken.value.code is ErrorCode.FILE_EXISTS
    with pytest.raises(GymError):
        keys.add("bob", "root")
    with pytest.raises(GymError) as missing:
        keys.remove("bob")
    assert missing.value.code is ErrorCode.NOT_FOUND
    keys.path.write_text('{"keys": [{"name": "x"}]}')
    with pytest.raises(GymError) as broken:
        keys.all()
    assert broken.value.code is ErrorCode.STATE_CORRUPT


def test_keys_added_at_the_same_time_are_all_kept(keys: WebKeys) -> None:
    names = [f"user{number}" for number in range(6)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: WebKeys(keys.path).add(name, "viewer"), names))
    assert sorted(key.name for key in keys.all()) == names


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_a_file_of_keys_that_others_may_write_to_lets_nobody_in(keys: WebKeys) -> None:
    secret = keys.add("ann", "viewer")
    keys.path.chmod(0o620)
    with pytest.raises(GymError, match="may be written by others") as refused:
        keys.find(secret)
    assert refused.value.code is ErrorCode.PERMISSION_DENIED


def test_a_file_of_keys_that_is_too_large_or_none_is_not_read(keys: WebKeys) -> None:
    for data, problem in ((b" " * (MAX_FILE_BYTES + 1), "larger than"), (b"{", "web_keys.json")):
        keys.path.write_bytes(data)
        with pytest.raises(GymError, match=problem) as refused:
            keys.find("gymweb-" + "0" * 64)
        assert refused.value.code is ErrorCode.STATE_CORRUPT


def test_more_keys_than_the_file_may_have_are_neither_added_nor_read(
    keys: WebKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = keys.add("ann", "viewer")
    monkeypatch.setattr(key_ring, "MAX_KEYS", 1)
    before = keys.path.read_bytes()
    with pytest.raises(GymError, match=r"web_keys\.json has 1 keys, which is the maximum") as refused:
        keys.add("bob", "viewer")
    assert refused.value.code is ErrorCode.TOO_LARGE
    monkeypatch.setattr(key_ring, "MAX_KEYS", MAX_KEYS)
    monkeypatch.setattr(key_ring, "MAX_FILE_BYTES", len(before) + 10)
    with pytest.raises(GymError, match="bytes, but the maximum is") as refused:
        keys.add("bob", "viewer")
    assert refused.value.code is ErrorCode.TOO_LARGE
    assert keys.path.read_bytes() == before
    assert keys.find(secret) is not None, "a refused key does not lock the others out"

    monkeypatch.undo()
    document = json.loads(before)
    document["keys"] *= MAX_KEYS + 1
    keys.path.write_text(json.dumps(document, separators=(",", ":")))
    assert keys.path.stat().st_size < MAX_FILE_BYTES
    with pytest.raises(GymError, match=f"at most {MAX_KEYS} items") as refused:
        keys.find(secret)
    assert refused.value.code is ErrorCode.STATE_CORRUPT


def test_logging_out_ends_the_session_alone(screens: Path) -> None:
    browser, other = opened(screens), None
    browser.get(f"/login?token={SECRET}")
    other = TestClient(browser.app, HERE, follow_redirects=False)
    other.get(f"/login?token={SECRET}")
    assert browser.post("/api/v1/logout", headers=csrf(browser)).status_code == 200
    assert browser.get("/api/v1/look").status_code == 401
    assert other.get("/api/v1/look").status_code == 200


def test_a_session_ends_on_the_server_whatever_the_browser_keeps(
    screens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = opened(screens)
    cookie = {"Cookie": f"gym_test_7000={browser.app.state.access.login(SECRET)}"}  # type: ignore[attr-defined]
    assert browser.get("/api/v1/look", headers=cookie).status_code == 200
    later = time.time() + SESSION_SECONDS + 1
    monkeypatch.setattr("gym_fed.web.access.time.time", lambda: later)
    assert browser.get("/api/v1/look", headers=cookie).status_code == 401


def test_the_token_for_a_started_browser_logs_in_once_and_within_a_minute(
    screens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    browser = opened(screens)
    access: Access = browser.app.state.access  # type: ignore[attr-defined]
    replaced, token = access.single_login(), access.single_login()
    assert browser.get("/api/v1/measure", headers={"Authorization": f"Bearer {token}"}).status_code == 401
    answers = [browser.get("/login", params={"token": each}).status_code for each in (replaced, token, token)]
    assert answers == [401, 303, 401]
    assert browser.get("/api/v1/look").json() == {"visitor": "token"}
    late = access.single_login()
    now = time.monotonic()
    monkeypatch.setattr("gym_fed.web.access.time.monotonic", lambda: now + 61)
    assert browser.get("/login", params={"token": late}).status_code == 401


@pytest.fixture
def command_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What browsers are started with; the user's home is ``tmp_path / "user"``."""
    lines: list[str] = []
    (tmp_path / "user").mkdir()
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "user")
    monkeypatch.setattr("webbrowser.open", lines.append)
    return lines


def test_a_browser_s_command_line_has_no_token_but_a_private_file_that_logs_in_once(
    screens: Path, keys: WebKeys, tmp_path: Path, command_lines: list[str]
) -> None:
    face = Face("test", "here", screens, routes(), Feed(lambda last: []))
    local = WebServer(face, "127.0.0.1:0", keys=keys, add_key="")
    local.open_browser()
    (uri,) = command_lines
    page = Path(url2pathname(urlsplit(uri).path))
    assert page.as_uri() == uri
    assert page.is_relative_to(tmp_path / "user"), "a snap reads no other folder"
    assert not any(part.startswith(".") for part in page.relative_to(tmp_path).parts)
    if os.name == "posix":
        assert page.stat().st_mode & 0o777 == 0o600
        assert page.parent.stat().st_mode & 0o777 == 0o700
    text = page.read_text()
    assert local.url not in text
    url = re.findall(r'http-equiv="refresh" content="0; url=([^"]+)"', text)[0]
    browser = TestClient(local.app, local.address, follow_redirects=False)
    assert browser.get("/login?token=wrong").status_code == 401
    assert page.exists()
    assert browser.get(url).status_code == 303
    assert browser.get("/api/v1/look").json() == {"visitor": "token"}
    assert not page.parent.exists()
    assert TestClient(local.app, local.address).get(url).status_code == 401
    local.open_browser()
    assert list((tmp_path / "user").iterdir())
    local.stop()
    assert not list((tmp_path / "user").iterdir()), "deleted at the end, though nobody logged in"


def test_a_browser_gets_the_address_where_keys_log_in_and_a_file_without_a_home(
    screens: Path, keys: WebKeys, tmp_path: Path, command_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    face = Face("test", "here", screens, routes(), Feed(lambda last: []))
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "none")
    local = WebServer(face, "127.0.0.1:0", keys=keys, add_key="")
    local.open_browser()
    assert command_lines[0].startswith("file:")
    local.stop()
    keys.add("otto", "operator")
    public = WebServer(face, "0.0.0.0:0", keys=keys, add_key="")
    public.open_browser()
    assert command_lines[1] == public.address
    public.stop()


def test_the_number_of_sessions_is_bounded(screens: Path, keys: WebKeys) -> None:
    browser = opened(screens, keys=keys)
    browser.get(f"/login?token={SECRET}")
    access: Access = browser.app.state.access  # type: ignore[attr-defined]
    for number in range(MAX_SESSIONS // MAX_SESSIONS_OF_KEY + 1):
        known = Visitor(f"key-{number}", Role.VIEWER)
        for _ in range(MAX_SESSIONS_OF_KEY):
            access._begin(known)
    assert len(access._sessions) == MAX_SESSIONS
    assert browser.get("/api/v1/look").status_code == 401, "the oldest session ended"


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {SECRET}", 200),
        (f"bearer {SECRET}", 200),
        (f"Basic {SECRET}", 401),
        ("Bearer", 401),
        ("", 401),
    ],
)
def test_a_program_sends_the_token_as_a_bearer_and_changes_nothing(
    authorization: str, status: int, screens: Path
) -> None:
    browser = opened(screens)
    header = {"Authorization": authorization}
    assert browser.get("/api/v1/measure", headers=header).status_code == status
    assert browser.get("/api/v1/look", headers=header).status_code == 401
    assert browser.post("/api/v1/change", json={}, headers=header).status_code == 401


def test_an_address_that_others_reach_needs_a_key(screens: Path, keys: WebKeys) -> None:
    face = Face("test", "here", screens, routes(), Feed(lambda last: []))
    with pytest.raises(GymError) as refused:
        WebServer(face, "0.0.0.0:0", keys=keys, add_key="the command that adds one")
    assert refused.value.code is ErrorCode.USAGE
    assert "the command that adds one" in str(refused.value.hint)
    keys.add("otto", "operator")
    served = WebServer(face, "0.0.0.0:0", keys=keys, add_key="")
    assert "token" not in served.url
    with pytest.raises(GymError) as taken:
        WebServer(face, served.address.removeprefix("http://"), keys=keys, add_key="")
    assert taken.value.code is ErrorCode.ADDRESS_IN_USE
    served.stop()


def test_head_is_answered_like_get_without_a_body(screens: Path) -> None:
    browser = opened(screens)
    browser.get(f"/login?token={SECRET}")
    for path in ("/", "/rounds", "/api/v1/look", "/static/app.js", "/static/gym.css", "/screens/home.js"):
        head, get = browser.head(path), browser.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == get.headers["content-type"]
    assert browser.head("/events").status_code == 405
    assert opened(screens).head("/api/v1/look").status_code == 401


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/", "GET, HEAD, OPTIONS"),
        ("/api/v1/look", "GET, HEAD, OPTIONS"),
        ("/api/v1/change", "OPTIONS, POST"),
        ("/static/app.js", "GET, HEAD, OPTIONS"),
    ],
)
def test_options_names_the_methods_of_a_path(path: str, allowed: str, screens: Path) -> None:
    answer = opened(screens).options(path)
    assert (answer.status_code, answer.headers["allow"]) == (204, allowed)


def test_below_a_prefix_the_page_the_redirect_and_the_cookie_have_it(screens: Path) -> None:
    (screens / "index.html").write_text('<head><script src="/screens/main.js"></script></head>')
    inner = opened(screens).app
    app = BehindProxy(inner, Proxies("/tools/gym"))  # type: ignore[arg-type]
    browser = TestClient(app, HERE, follow_redirects=False)
    answer = browser.get(f"/tools/gym/login?token={SECRET}")
    assert answer.headers["location"] == "/tools/gym/"
    assert "Path=/tools/gym;" in answer.headers["set-cookie"]
    for path in ("/tools/gym", "/tools/gym/rounds", "/"):
        assert '"/tools/gym/screens/main.js"' in browser.get(path).text
    assert browser.get("/tools/gym/static/app.js").headers["cache-control"] == "no-cache"
    assert browser.get("/tools/gym/api/v1/look").json() == {"visitor": "token"}


def test_behind_a_trusted_proxy_keys_replace_the_token(screens: Path, keys: WebKeys) -> None:
    face = Face("test", "a", screens, routes(), Feed(lambda last: []))
    proxies = Proxies(trusted=("127.0.0.1/32",))
    with pytest.raises(GymError, match="nobody could log in"):
        WebServer(face, "127.0.0.1:0", keys=keys, add_key="the command", proxies=proxies)
    keys.add("otto", "operator")
    served = WebServer(face, "127.0.0.1:0", keys=keys, add_key="", proxies=proxies)
    assert "token" not in served.url
    served.stop()
