"""The contributor's home: key, lock, receipts, and names that may not become paths."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from gym_client.identity import home as module
from gym_client.identity.address import Address
from gym_client.identity.home import Home

from gym_fed.core.errors import ErrorCode, GymError


def test_the_key_is_private_and_stays_the_same(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home")
    contributor = home.key.contributor
    assert stat.S_IMODE((home.folder / "key.pem").stat().st_mode) == 0o600
    assert stat.S_IMODE(home.folder.stat().st_mode) == 0o700
    assert Home.open(tmp_path / "home").key.contributor == contributor


def test_the_instance_stays_the_same_and_a_broken_one_is_named(tmp_path: Path) -> None:
    home = Home.open(tmp_path)
    assert home.instance == Home.open(tmp_path).instance
    (tmp_path / "instance").write_text("what")
    with pytest.raises(GymError, match="'what'") as caught:
        _ = home.instance
    assert caught.value.code is ErrorCode.STATE_CORRUPT


def test_the_environment_names_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GYM_HOME", str(tmp_path / "elsewhere"))
    assert Home.open().folder == tmp_path / "elsewhere"
    assert Home.open(tmp_path / "given").folder == tmp_path / "given"


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (errno.EROFS, ErrorCode.NOT_WRITABLE),
        (errno.ENOSPC, ErrorCode.DISK_FULL),
        (errno.EEXIST, ErrorCode.FILE_EXISTS),
    ],
)
def test_a_home_that_cannot_be_made_is_refused_as_any_other_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: ErrorCode
) -> None:
    def mkdir(path: Path, mode: int) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(module, "make_folder", mkdir)
    with pytest.raises(GymError, match="home") as caught:
        Home.open(tmp_path / "home")
    assert caught.value.code is code
    assert caught.value.hint


def test_a_second_process_learns_who_holds_the_home_and_gets_it_after_a_kill(tmp_path: Path) -> None:
    hold = "import sys, time; from gym_client.identity.home import Home\n"
    hold += "with Home.open(sys.argv[1]).locked(): print('held', flush=True); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(GymError, match=f"process {other.pid}") as caught, Home.open(tmp_path).locked():
            pass
        assert caught.value.code is ErrorCode.STATE_LOCKED
    finally:
        other.kill()
        other.wait()
    with Home.open(tmp_path).locked():
        pass


def test_a_receipt_is_kept_once_and_a_line_cut_short_by_a_crash_is_left_behind(tmp_path: Path) -> None:
    home = Home.open(tmp_path)
    home.append_receipt({"update": "a"})
    home.append_receipt({"update": "a"})
    with home.receipts_path.open("a") as file:
        file.write('{"update": "b", "ver')
    home.append_receipt({"update": "c"})
    assert home.receipts() == [{"update": "a"}, {"update": "c"}]


@pytest.mark.parametrize("name", ["../x", "/etc", "..", ".hidden", "a/b", "", "x" * 200, "a\nb"])
def test_a_task_id_that_is_a_path_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(GymError, match="not a plain name"):
        Home.open(tmp_path).task_folder(name)


def test_settings_are_remembered_and_forgotten(tmp_path: Path) -> None:
    home = Home.open(tmp_path)
    home.remember(data="a.jsonl", model="m")
    home.remember(model=None)
    assert home.settings() == {"data": "a.jsonl"}


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("example.org", "example.org", 9443),
        ("example.org:1234", "example.org", 1234),
        ("[::1]:99", "::1", 99),
        ("[::1]", "::1", 9443),
        ("::1", "::1", 9443),
    ],
)
def test_addresses_are_read(text: str, host: str, port: int) -> None:
    assert Address.parse(text) == Address(host, port)
    assert Address.parse(str(Address.parse(text))) == Address(host, port)


@pytest.mark.parametrize(
    "text", ["", "host:", "host:0", "host:99999", "http://host", "user@host:1", "host:x"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(GymError) as caught:
        Address.parse(text)
    assert caught.value.code is ErrorCode.USAGE


def test_loopback_is_recognised() -> None:
    assert all(Address(h, 1).is_loopback for h in ("localhost", "127.0.0.1", "127.9.9.9", "::1"))
    assert not any(Address(h, 1).is_loopback for h in ("10.0.0.1", "localhost.example.org", "0.0.0.0"))
