"""The file of API keys: it holds hashes only, changes at run time, and is never half written."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.http.keys import Authenticator, KeyFile, bearer_token, hashed, require_local
from gym_fed.serving.openai.catalogue import LOCAL, Caller


def test_a_key_opens_what_it_was_made_for_and_is_not_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key = KeyFile(path).add(
        "ann", variants=("a", "a"), owners=("c0123456789abcdef0123456789abcdef",), base=False
    )
    assert key.startswith("gym-")
    assert len(key) >= 4 + 43  # 32 random bytes
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    wanted = Caller(
        "ann",
        False,
        False,
        frozenset({"a"}),
        frozenset({"c0123456789abcdef0123456789abcdef"}),
        key_sha256=hashed(key),
    )
    assert KeyFile(path).caller(key) == wanted
    assert KeyFile(path).caller(f"{key}x") is None


def test_a_server_that_runs_sees_keys_come_and_go(tmp_path: Path) -> None:
    server = KeyFile(tmp_path / "keys.json")
    first = server.add("ann")
    assert server.caller(first) is not None
    operator = KeyFile(tmp_path / "keys.json")
    second = operator.add("bob")
    assert server.caller(second) == Caller("bob", key_sha256=hashed(second))
    operator.remove("ann")
    assert server.caller(first) is None
    assert server.caller(second) is not None


def test_an_expired_key_opens_nothing(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    assert keys.caller(keys.add("past", expires_at=int(time.time()) - 1)) is None
    assert keys.caller(keys.add("future", expires_at=int(time.time()) + 3600)) is not None


def test_what_cannot_be_a_key_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    keys.add("ann")
    before = keys.path.read_bytes()
    cases = {
        ErrorCode.FILE_EXISTS: {"name": "ann"},
        ErrorCode.USAGE: {"name": "b", "base": False},
        ErrorCode.NOT_FOUND: None,
    }
    for code, values in cases.items():
        with pytest.raises(GymError) as caught:
            keys.remove("b") if values is None else keys.add(**values)  # type: ignore[arg-type]
        assert caught.value.code is code
    for name, variants in (("no spaces", ()), ("b", ("bad/name",))):
        with pytest.raises(GymError, match="API key"):
            keys.add(name, variants=variants)
    assert keys.path.read_bytes() == before


@pytest.mark.parametrize("spoil", ["mode", "json", "field", "gone"])
def test_a_file_that_cannot_be_trusted_lets_nobody_in(
    tmp_path: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("ann")
    assert keys.caller(key) is not None
    text = keys.path.read_text()
    if spoil == "mode":
        keys.path.chmod(0o622)
    elif spoil == "gone":
        keys.path.unlink()
    else:
        keys.path.write_text(text[:-9] if spoil == "json" else text.replace('"base"', '"bas"'))
    with pytest.raises(GymError, match=r"keys\.json"):
        keys.caller(key)
    gate = Authenticator(keys)
    for ask in (lambda: gate.caller({"authorization": f"Bearer {key}"}), gate.require_usable):
        with pytest.raises(GymError) as caught:
            ask()
        assert caught.value.code.http_status == 503
        assert "keys.json" not in str(caught.value)
    assert "keys.json" in caplog.text


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer gym-x", "gym-x"),
        ("bearer gym-x", "gym-x"),
        ("Basic gym-x", None),
        ("Bearer", None),
        ("Bearer a b", None),
        (None, None),
    ],
)
def test_a_key_is_read_of_a_bearer_header(header: str | None, token: str | None) -> None:
    assert bearer_token(header) == token


def test_with_keys_a_caller_without_one_is_refused(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    gate = Authenticator(keys)
    key = keys.add("ann")
    assert gate.caller({"authorization": f"Bearer {key}", "host": "anything"}).name == "ann"
    for headers in ({}, {"authorization": "Bearer gym-wrong"}):
        with pytest.raises(GymError) as caught:
            gate.caller(headers)
        assert caught.value.code.http_status == 401


@pytest.mark.parametrize(
    ("host", "origin", "fine"),
    [
        ("127.0.0.1:8000", None, True),
        ("localhost:8000", "http://localhost:3000", True),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("evil.example:8000", None, False),
        ("127.0.0.1.evil.example", None, False),
        ("localhost@evil.example", None, False),
        ("10.0.0.1", None, False),
        ("", None, False),
        ("127.0.0.1:8000", "https://evil.example", False),
        ("127.0.0.1:8000", "null", False),
    ],
)
def test_without_keys_only_this_machine_and_its_pages_are_served(
    host: str, origin: str | None, fine: bool
) -> None:
    headers = {"host": host} if origin is None else {"host": host, "origin": origin}
    if fine:
        require_local(headers, frozenset())
        assert Authenticator(None).caller(headers) is LOCAL
        return
    with pytest.raises(GymError) as caught:
        require_local(headers, frozenset())
    assert caught.value.code is ErrorCode.PERMISSION_DENIED


def test_the_commands_make_show_and_take_away_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gym_fed.cli.main import app

    monkeypatch.chdir(tmp_path)

    def gym(*words: str) -> str:
        app(["api", "keys", *words], standalone_mode=False)
        return capsys.readouterr().out

    made = json.loads(gym("add", "ann", "--variant", "a", "--owner", "o", "--no-base", "--json"))
    caller = KeyFile(tmp_path / "api_keys.json").caller(made["key"])
    assert caller == Caller(
        "ann", False, False, frozenset({"a"}), frozenset({"o"}), key_sha256=hashed(made["key"])
    )
    key = gym("add", "bob", "--all-variants", "--expires-days", "1").strip()
    assert KeyFile(tmp_path / "api_keys.json").caller(key) == Caller(
        "bob", everything=True, key_sha256=hashed(key)
    )
    shown = gym("list")
    assert "a, those of o" in shown
    assert key not in shown
    assert [key["name"] for key in json.loads(gym("list", "--json"))] == ["ann", "bob"]
    watching = gym("add", "prometheus", "--no-base", "--metrics").strip()
    assert KeyFile(tmp_path / "api_keys.json").caller(watching) == Caller(
        "prometheus", False, metrics=True, key_sha256=hashed(watching)
    )
    limited = ["--manage-variants", "--requests-per-minute", "60", "--tokens-per-minute", "9000"]
    managing = gym("add", "admin", *limited).strip()
    wanted = Caller(
        "admin",
        manage_variants=True,
        requests_per_minute=60,
        tokens_per_minute=9000,
        key_sha256=hashed(managing),
    )
    assert KeyFile(tmp_path / "api_keys.json").caller(managing) == wanted
    assert json.loads(gym("list", "--json"))[-1]["tokens_per_minute"] == 9000
    with pytest.raises(GymError, match="API key: requests_per_minute"):
        KeyFile(tmp_path / "api_keys.json").add("none", requests_per_minute=0)
    gym("remove", "admin")
    gym("remove", "prometheus")
    gym("remove", "ann")
    assert KeyFile(tmp_path / "api_keys.json").caller(made["key"]) is None
