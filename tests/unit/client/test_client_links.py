"""`gym-client install-links`: a link is one argument of one command, on every platform, and joins nothing by itself."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from gym_client.identity.home import Home
from gym_client.link_handler import LinkHandler, link_handler, link_handler_of
from gym_client.removal import client_files_of, remove
from gym_client.web.app import open_ui
from starlette.testclient import TestClient

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.login import Invite, format_invite
from gym_fed.web.server import WebServer
from tests.support.in_process import run_here
from tests.support.wait import until
from tests.unit.client.test_client_service import HOSTILE

LINK = format_invite(Invite("hub.example.org", 9443, f"sha256:{'a' * 64}", "b" * 32))
HOSTILE_LINKS = [
    LINK,
    "gym://x --home=/evil",
    "gym://$(touch pwned)",
    'gym://x" --open "',
    "gym://x';touch pwned;'",
    "gym://%u%%f`id`",
    "gym://x\\",
]
needs_xdg = pytest.mark.skipif(
    not (shutil.which("xdg-mime") and shutil.which("xdg-open")), reason="xdg-utils is not on this machine"
)


@pytest.fixture
def desktop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, as the programs of a desktop find it."""
    user = tmp_path / "user"
    user.mkdir()
    monkeypatch.setenv("HOME", str(user))
    monkeypatch.setenv("DISPLAY", ":0")  # without one, the plain xdg-open only tries browsers
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CURRENT_DESKTOP", "DESKTOP_SESSION", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    return user


def words(folder: Path) -> list[str]:
    return [str(folder / "bin" / "gym-client"), "ui", f"--home={folder / 'home'}"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_desktop_entry_is_read_back_as_the_command_and_one_place_for_the_link(
    name: str, desktop: Path
) -> None:
    given = words(Path("/srv") / name)
    text = link_handler("linux", Path("/srv/home"), given, desktop).text
    line = re.findall("^Exec=(.*)$", text, re.MULTILINE)
    shown = "printf '%s\\n' " + line[0].replace("\\\\", "\\")  # the specification's quotes are the shell's
    read = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [word.replace("%%", "%") for word in read] == [*given, "--", "%u"]
    assert not re.findall("(?<!%)%(?!%|u$)", line[0]), "no other field code"


@pytest.mark.parametrize("name", HOSTILE)
def test_an_applet_of_macos_quotes_the_command_for_the_shell_and_the_link_too(
    name: str, tmp_path: Path
) -> None:
    given = words(Path("/srv") / name)
    handler = link_handler("macos", tmp_path / "home", given, tmp_path)
    found = re.search(r'do shell script "((?:[^"\\]|\\.)*)" & quoted form of this_link & ', handler.text)
    assert found is not None
    assert shlex.split(re.sub(r"\\(.)", r"\1", found[1])) == [*given, "--"]
    app = str(tmp_path / "Applications" / "gym-client-links.app")
    assert handler.unregister == [["rm", "-rf", app]]


@pytest.mark.parametrize("name", [name for name in HOSTILE if "%" not in name])
def test_windows_starts_the_command_with_the_link_behind_its_options(name: str, tmp_path: Path) -> None:
    given = words(Path("/srv") / name)
    handler = link_handler("windows", tmp_path, given, tmp_path)
    assert handler.content.decode("utf-16") == handler.text
    value = re.findall('^@="(.*)"\r$', handler.text, re.MULTILINE)[-1]
    assert re.sub(r"\\(.)", r"\1", value) == f'{subprocess.list2cmdline(given)} -- "%1"'
    assert re.findall(r"^\[(.*)\]\r$", handler.text, re.MULTILINE) == [
        r"HKEY_CURRENT_USER\Software\Classes\gym",
        r"HKEY_CURRENT_USER\Software\Classes\gym\shell\open\command",
    ]


def test_a_path_that_a_system_would_change_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GymError, match="percent") as caught:
        link_handler("windows", tmp_path, words(Path("/srv/%1")), tmp_path)
    assert caught.value.code is ErrorCode.USAGE
    with pytest.raises(GymError, match="control characters"):
        link_handler("linux", tmp_path, words(Path("/srv/a\nExec=x")), tmp_path)


@needs_xdg
def test_the_desktop_hands_a_hostile_link_over_as_one_argument(desktop: Path, tmp_path: Path) -> None:
    program, seen = tmp_path / "gym-client", tmp_path / "seen"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$#" "$@" > {seen}\n')
    program.chmod(0o755)
    link_handler("linux", tmp_path / "home", [str(program), "ui", "--port=0"], desktop).add()
    for link in HOSTILE_LINKS:
        subprocess.run(["xdg-open", link], cwd=desktop, capture_output=True, check=True)
        assert seen.read_text().splitlines() == ["4", "ui", "--port=0", "--", link]
    assert not list(tmp_path.rglob("pwned"))


@needs_xdg
def test_uninstall_removes_the_handler_of_its_own_home_and_no_other_default(
    desktop: Path, tmp_path: Path
) -> None:
    first, other = Home.open(tmp_path / "first"), Home.open(tmp_path / "other")
    assert first.key.contributor
    defaults = desktop / ".config" / "mimeapps.list"
    defaults.parent.mkdir()
    defaults.write_text("[Default Applications]\ntext/plain=editor.desktop\n")
    link_handler_of(first).add()
    assert "x-scheme-handler/gym=" in defaults.read_text()
    assert not link_handler_of(other).remove()
    removal = client_files_of(first)
    assert link_handler_of(first).path in removal.files
    remove(first, removal)
    assert defaults.read_text().split() == ["[Default", "Applications]", "text/plain=editor.desktop"]
    assert not link_handler_of(first).path.exists()


def test_other_default_programs_are_kept_byte_for_byte_in_any_encoding(tmp_path: Path) -> None:
    entry, defaults = tmp_path / "links.desktop", tmp_path / "mimeapps.list"
    others = b"[Default Applications]\ntext/plain=\xe9diteur.desktop\r\n# \x85 \xe2\x80\xa8\n"
    entry.write_bytes(b"x")
    defaults.write_bytes(others + b"x-scheme-handler/gym=links.desktop;\n")
    line = "x-scheme-handler/gym=links.desktop"
    assert LinkHandler(entry, b"x", "x", [], [], defaults=defaults, default_line=line).remove()
    assert defaults.read_bytes() == others
    assert not entry.exists()


def test_without_the_desktops_program_nothing_is_written(
    desktop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run_here(["gym-client", "install-links", "--home", str(tmp_path / "home"), "--platform", "linux"])
    assert done.returncode == ErrorCode.MISSING_DEPENDENCY.exit_code
    assert "xdg-utils" in done.stderr
    assert list(desktop.iterdir()) == []


def test_a_failed_command_of_the_system_is_an_error_that_shows_what_it_said(tmp_path: Path) -> None:
    script = ["sh", "-c", "echo no such type >&2; exit 3"]
    handler = LinkHandler(tmp_path / "file", b"x", "x", register=[script], unregister=[script])
    with pytest.raises(GymError, match="code 3: no such type"):
        handler.add()
    with pytest.raises(GymError, match="code 3: no such type"):
        handler.remove()
    assert not handler.remove(), "a second call does not fail"


@pytest.mark.parametrize(
    "given",
    [
        ["http://hub.example.org/"],
        ["--", "javascript:alert(1)"],
        ["gym:/x"],
        ["gym://a\x1b[2Jb"],
        ["gym://a\u202eb"],
        ["gym://" + "a" * 1000],
        ["--", "gym://x", "--home=/evil"],
        [f"gym://hub.example.org/{'a' * 64} {LINK}"],
        [f"{LINK} {LINK}"],
        [f"{LINK}\n"],
        [LINK[:-3]],
        [LINK.replace(":9443", ":99999")],
        [LINK.replace("9443", "\u0669\u0664\u0664\u0663")],
    ],
)
def test_a_page_is_opened_by_no_text_but_one_link(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gym_client.web.app.open_ui", lambda *_, **__: pytest.fail("a page was opened"))
    done = run_here(["gym-client", "ui", "--home", str(tmp_path / "home"), "--no-open", *given])
    assert done.returncode in (ErrorCode.USAGE.exit_code, ErrorCode.INVITE_INVALID.exit_code)
    assert "\x1b" not in done.stderr


def test_the_page_of_a_link_shows_it_and_starts_nothing(tmp_path: Path) -> None:
    home = Home.open(tmp_path / "home")
    server, jobs = open_ui(home, "127.0.0.1:0", invite=LINK)
    page = TestClient(server.app, base_url=server.address)
    assert page.get("/api/v1/join").status_code == 401, "the invite is for who has the token"
    page.post("/api/v1/login", json={"key": server.url.partition("token=")[2]})
    assert page.get("/api/v1/join").json()["invite"] == LINK
    assert jobs.list() == []
    server.stop()


def test_a_click_on_a_link_that_is_cut_opens_the_page_with_the_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody sees the terminal of a click; a user of a terminal gets the error there."""
    pages: list[WebServer] = []
    monkeypatch.setattr(WebServer, "run", lambda server: pages.append(server))
    monkeypatch.setattr(WebServer, "open_browser", lambda _: True)
    words = ["gym-client", "ui", "--home", str(tmp_path / "home"), "--port", "0"]
    done = run_here([*words, LINK[:-1]])
    assert done.returncode == ErrorCode.INVITE_INVALID.exit_code
    assert not pages
    done = run_here([*words, "--open", "--until-closed", "--", LINK[:-1]])
    assert done.returncode == 0, done.stderr
    page = TestClient(pages[0].app, base_url=pages[0].address)
    page.post("/api/v1/login", json={"key": pages[0].url.partition("token=")[2]})
    shown = page.get("/api/v1/join").json()
    assert shown["invite"] == ""
    assert "is not an invite" in shown["link_problem"]
    pages[0].stop()


@needs_xdg
def test_the_page_registers_links_and_undoes_it(desktop: Path, tmp_path: Path) -> None:
    server, _ = open_ui(Home.open(tmp_path / "home"), "127.0.0.1:0")
    page = TestClient(server.app, base_url=server.address)
    page.post("/api/v1/login", json={"key": server.url.partition("token=")[2]})
    page.headers["X-CSRF-Token"] = page.get("/api/v1/session").json()["csrf"]
    assert page.get("/api/v1/links").json() == {"is_registered": False}
    for wanted in (True, False):
        assert page.post("/api/v1/links", json={"is_registered": wanted}).json() == {"is_registered": wanted}
        assert page.get("/api/v1/links").json() == {"is_registered": wanted}
    server.stop()


def test_a_page_without_a_terminal_ends_after_it_was_closed(tmp_path: Path) -> None:
    server, _ = open_ui(Home.open(tmp_path / "home"), "127.0.0.1:0", unused_seconds=0.4)
    server.start()
    assert server._thread is not None
    browser = build_opener(HTTPCookieProcessor())
    browser.open(server.url).close()
    with browser.open(f"{server.address}/events") as stream:
        assert stream.readline()
        server._thread.join(1.5)
        assert server._thread.is_alive(), "a page is open"
    until(lambda: server._thread is None or not server._thread.is_alive(), "the end of the page")
    server.stop()


def test_a_link_is_printed_for_another_system_and_registered_on_this_one_alone(tmp_path: Path) -> None:
    other = "windows" if os.name == "posix" else "linux"
    words = ["gym-client", "install-links", "--home", str(tmp_path / "home"), "--platform", other]
    assert run_here([*words, "--print"]).stdout
    assert run_here(words).returncode == ErrorCode.USAGE.exit_code
