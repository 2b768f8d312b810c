"""`gym-client install-service`: files that each platform's own reader reads back as what was meant."""

from __future__ import annotations

import json
import os
import plistlib
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from gym_client.hub.known import LAST_SERVER
from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.keystore import Keystore
from gym_client.identity.pins import ServerPin
from gym_client.service_files import (
    ServiceJob,
    needs_a_person,
    platform_of,
    service_file,
    service_of,
    written_files,
)

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.passphrase import PassphraseSource
from tests.support.in_process import run_here

HOSTILE = [
    "plain",
    "with space",
    'a"quote',
    "it's",
    "100%s",
    "back\\slash",
    "$HOME",
    "$(id)",
    "semi;colon",
    "ümlaut",
]
TASK = "{http://schemas.microsoft.com/windows/2004/02/mit/task}"


def service(folder: Path, passphrase: bool = False) -> ServiceJob:
    return ServiceJob(
        [str(folder / "bin" / "gym-client")],
        folder / "home",
        {"HOME": str(folder)},
        folder / "secret" if passphrase else None,
    )


def line(text: str, name: str) -> str:
    return next(each for each in text.splitlines() if each.startswith(f"{name}=")).partition("=")[2]


@pytest.mark.parametrize("name", HOSTILE)
def test_launchd_reads_every_path_back_as_it_is(name: str) -> None:
    folder = Path("/srv") / name
    file = service_file("macos", service(folder, passphrase=True), folder)
    found = plistlib.loads(file.content)
    assert found["ProgramArguments"] == [
        f"{folder}/bin/gym-client",
        "join",
        "--passphrase-file",
        f"{folder}/secret",
        "--service",
    ]
    assert found["EnvironmentVariables"] == {"HOME": str(folder), "GYM_HOME": f"{folder}/home"}
    assert file.path.parent == folder / "Library/LaunchAgents"


@pytest.mark.parametrize("name", HOSTILE)
def test_task_scheduler_gets_one_program_and_its_arguments(name: str) -> None:
    folder = Path("/srv") / name
    file = service_file("windows", service(folder), folder)
    action = ElementTree.fromstring(file.content.decode("utf-16")).find(f"{TASK}Actions/{TASK}Exec")
    assert action is not None
    assert action.findtext(f"{TASK}Command") == f"{folder}/bin/gym-client"
    assert action.findtext(f"{TASK}Arguments") == subprocess.list2cmdline(
        ["join", "--service", "--home", f"{folder}/home"]
    )


def test_task_scheduler_would_replace_a_variable_in_a_path_so_that_it_is_refused() -> None:
    with pytest.raises(GymError, match="%") as caught:
        service_file("windows", service(Path("/srv/%TEMP%")), Path("/srv"))
    assert caught.value.code is ErrorCode.USAGE


@pytest.mark.parametrize("platform", ["linux", "macos", "windows"])
@pytest.mark.parametrize("name", ["a\nExecStart=x", "a\x85b", "a\u2028b", os.fsdecode(b"\xff"), "a\ufffe"])
def test_a_path_that_no_file_can_hold_or_that_could_add_lines_is_refused(platform: str, name: str) -> None:
    with pytest.raises(GymError, match="control characters") as caught:
        service_file(platform, service(Path("/srv") / name), Path("/srv"))  # type: ignore[arg-type]
    assert caught.value.code is ErrorCode.USAGE


@pytest.mark.parametrize("name", ["secret\\", "secret "])
def test_a_passphrase_file_whose_name_systemd_would_not_read_to_its_end_is_refused(name: str) -> None:
    job = ServiceJob(["/bin/gym-client"], Path("/srv/home"), {}, Path("/srv") / name)
    with pytest.raises(GymError, match="systemd") as caught:
        service_file("linux", job, Path("/srv"))
    assert caught.value.code is ErrorCode.USAGE


def test_a_unit_of_systemd_escapes_quotes_specifiers_and_variables() -> None:
    text = service_file("linux", service(Path('/srv/a "b" 5% $X')), Path("/srv/me")).text
    assert line(text, "ExecStart") == '/usr/bin/env "/srv/a \\"b\\" 5%% $$X/bin/gym-client" "join"'
    assert line(text, "Environment") == '"HOME=/srv/a \\"b\\" 5%% $X"'


def test_a_passphrase_is_a_credential_and_stands_in_no_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("correct horse")
    for platform in ("linux", "macos", "windows"):
        file = service_file(platform, service(tmp_path, passphrase=True), tmp_path)  # type: ignore[arg-type]
        assert "correct horse" not in file.text
    unit = service_file("linux", service(tmp_path, passphrase=True), tmp_path).text
    assert line(unit, "LoadCredential") == f"passphrase:{tmp_path}/secret"
    assert line(unit, "ExecStart").endswith('"join" --passphrase-file "%d/passphrase"')


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not on this machine")
@pytest.mark.parametrize("name", HOSTILE)
def test_systemd_finds_nothing_wrong_with_a_unit(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    (folder / "bin").mkdir(parents=True)
    program = folder / "bin" / "gym-client"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (folder / "secret").write_text("x")
    file = service_file("linux", service(folder, passphrase=True), tmp_path)
    unit = tmp_path / "gym-client.service"
    unit.write_bytes(file.content)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert "gym-client.service" not in done.stderr


@pytest.mark.parametrize(
    ("code", "is_final"),
    [
        (ErrorCode.TERMS_CHANGED, True),
        (ErrorCode.SERVER_KEY_CHANGED, True),
        (ErrorCode.UNAVAILABLE, False),
        (ErrorCode.DISK_FULL, False),
    ],
)
def test_a_service_is_started_again_only_where_no_person_is_needed(code: ErrorCode, is_final: bool) -> None:
    unit = service_file("linux", service(Path("/srv")), Path("/srv/me")).text
    assert needs_a_person(code) is is_final
    assert (str(code.exit_code) in line(unit, "RestartPreventExitStatus").split()) is is_final


def joined(folder: Path) -> Home:
    """A home that has joined a hub and accepted its terms."""
    home, address = Home.open(folder), Address.parse("hub.example.org:9443")
    pin = ServerPin(
        address=str(address),
        fingerprint="sha256:" + "0" * 64,
        certificate_pem="",
        contributor="c" + "0" * 32,
        server="s" + "1" * 16,
    )
    pin.save(home, address)
    home.remember(**{LAST_SERVER: str(address)})
    home.consents_path.write_text('{"s1111111111111111": [{"data": "d", "asked": {}}]}')
    return home


def installed(*arguments: object, user: Path) -> subprocess.CompletedProcess[str]:
    return run_here(["gym-client", "install-service", *map(str, arguments)], env={"HOME": str(user)})


@pytest.mark.parametrize(("words", "status"), [((), 11), (("--service",), 0)])
def test_a_service_that_only_a_person_can_help_ends_with_0_and_says_why(
    tmp_path: Path, words: tuple[str, ...], status: int
) -> None:
    home = joined(tmp_path / "h")
    arguments = ["join", "--home", str(home.folder), "--data", str(tmp_path / "gone.jsonl"), *words]
    done = run_here(["gym-client", *arguments], env={"HOME": str(tmp_path)})
    assert done.returncode == status
    assert "file-not-found" in done.stderr


def test_a_service_whose_hub_is_away_ends_with_the_errors_code(tmp_path: Path) -> None:
    home = joined(tmp_path / "h")
    arguments = ["join", "--home", str(home.folder), "--server", "127.0.0.1:1", "--no-wait", "--service"]
    done = run_here(
        ["gym-client", *arguments, "--fingerprint", "sha256:" + "0" * 64], env={"HOME": str(tmp_path)}
    )
    assert done.returncode == ErrorCode.UNAVAILABLE.exit_code, done.stderr


def test_a_home_that_never_accepted_terms_gets_no_service(tmp_path: Path) -> None:
    done = installed("--home", tmp_path / "h", "--json", user=tmp_path)
    error = json.loads(done.stderr)["error"]
    assert error["code"] == "usage"
    assert "gym-client join --server HOST" in error["hint"]
    assert not (tmp_path / ".config").exists()


def test_the_file_is_printed_written_and_deleted(tmp_path: Path) -> None:
    home = joined(tmp_path / "a home")
    unit = tmp_path / ".config/systemd/user/gym-client.service"
    options = ("--home", home.folder, "--platform", "linux")
    printed = installed(*options, "--print", user=tmp_path)
    assert not unit.exists()
    done = installed(*options, user=tmp_path)
    assert unit.read_text() == done.stdout == printed.stdout, (
        "the file alone, as it can be piped to its place"
    )
    assert "systemctl --user enable --now gym-client.service" in done.stderr
    assert "loginctl enable-linger" in done.stderr
    assert f'"GYM_HOME={home.folder}"' in unit.read_text()
    assert "deleted " in installed(*options, "--uninstall", user=tmp_path).stdout
    assert not unit.exists()
    assert "does not exist" in installed(*options, "--uninstall", user=tmp_path).stdout


def test_a_key_under_a_passphrase_needs_its_file(tmp_path: Path) -> None:
    home = joined(tmp_path / "h")
    Keystore(home.folder).encrypt(PassphraseSource("X", ask=lambda what: "correct horse battery"))
    found = json.loads(installed("--home", home.folder, "--json", user=tmp_path).stderr)
    assert found["error"]["code"] == "key-locked"
    assert "--passphrase-file FILE" in found["error"]["hint"]
    assert "does not exist" in installed("--home", home.folder, "--uninstall", user=tmp_path).stdout


@pytest.mark.parametrize("platform", ["linux", "darwin", "win32"])
@pytest.mark.parametrize("name", ["plain", "100%s", "a&b", "with space"])
def test_the_service_file_of_a_home_is_known_and_that_of_a_longer_path_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, name: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", platform)
    home, other = Home.open(tmp_path / name), Home.open(tmp_path / f"{name}2")
    file = service_file(platform_of(None), service_of(other, None), tmp_path)
    file.path.parent.mkdir(parents=True, exist_ok=True)
    file.path.write_bytes(file.content)
    assert written_files(other) == (file.path,)
    assert written_files(home) == ()
