"""Service files that run `gym-client join` in the background: for systemd, launchd and the Windows Task Scheduler.

The files contain no secrets; a passphrase remains in its own file.
"""

from __future__ import annotations

import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from gym_client.identity.home import Home
from gym_fed.core.child_process import module_command
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain

Platform = Literal["linux", "macos", "windows"]
_NAME = "gym-client"
_LABEL = "org.gym-fed.client"
_RESTART_SECONDS = 60
_STOP_SECONDS = 300
_TASK = "http://schemas.microsoft.com/windows/2004/02/mit/task"
_CREDENTIAL = "passphrase"
_NO_PROGRAM = "\"'\\$"
"""Characters that systemd rejects or expands in the path of a program."""

_FINAL = (
    ErrorCode.USAGE,
    ErrorCode.CONFIG_INVALID,
    ErrorCode.FILE_NOT_FOUND,
    ErrorCode.DATA_INVALID,
    ErrorCode.MODEL_INVALID,
    ErrorCode.MODEL_NOT_FOUND,
    ErrorCode.BASE_MISMATCH,
    ErrorCode.UNAUTHENTICATED,
    ErrorCode.PERMISSION_DENIED,
    ErrorCode.SERVER_KEY_CHANGED,
    ErrorCode.SIGNATURE_INVALID,
    ErrorCode.KEY_REVOKED,
    ErrorCode.KEY_LOCKED,
    ErrorCode.TERMS_CHANGED,
    ErrorCode.POLICY_REFUSED,
    ErrorCode.MISSING_DEPENDENCY,
    ErrorCode.STATE_CORRUPT,
    ErrorCode.LEDGER_FORKED,
    ErrorCode.HUB_RESTORED,
)
"""Errors that only a person can fix; the service is not restarted after one of them."""


def needs_a_person(code: ErrorCode) -> bool:
    """Return True if `gym-client join` would fail with the same error after a restart."""
    return code in _FINAL


def platform_of(given: str | None) -> Platform:
    """Return the platform with the given name; None means this machine's platform.

    Raises:
        GymError: ``USAGE`` for an unknown name.
    """
    known: dict[str, Platform] = {"linux": "linux", "macos": "macos", "windows": "windows"}
    here = {"darwin": "macos", "win32": "windows"}.get(sys.platform, "linux")
    chosen = known.get(given or here)
    if chosen is None:
        raise GymError(
            ErrorCode.USAGE, f"--platform {given!r} is not supported", f"use one of {', '.join(known)}"
        )
    return chosen


def written_files(home: Home) -> tuple[Path, ...]:
    """Return the service file of this home, if `gym-client install-service` has written one on this machine."""
    file = service_file(platform_of(None), service_of(home, None), Path.home())
    try:
        is_own = file.own_mark in file.path.read_bytes()
    except OSError:
        return ()
    return (file.path,) if is_own else ()


def service_of(home: Home, passphrase_file: Path | None) -> ServiceJob:
    """Return the command that a service of this home runs."""
    carried = {name: os.environ[name] for name in ("HOME", "HF_HOME") if os.environ.get(name)}
    file = passphrase_file.expanduser().absolute() if passphrase_file else None
    return ServiceJob(client_command(), home.folder, carried, file)


def client_command() -> list[str]:
    """Return the `gym-client` command of this installation."""
    installed = Path(sys.executable).with_name("gym-client")
    if installed.is_file():
        return [str(installed)]
    program = shutil.which("gym-client")
    return [program] if program else module_command("gym_client.cli.entry")


@dataclass(frozen=True)
class ServiceJob:
    """The command that a service runs.

    Attributes:
        command: Program and first arguments, before ``join``.
        home: The contributor's home folder.
        environment: Additional environment variables, such as ``HOME``.
        passphrase_file: A file with the passphrase in its first line; None if the key has no passphrase.
    """

    command: Sequence[str]
    home: Path
    environment: dict[str, str]
    passphrase_file: Path | None

    def words(self) -> list[str]:
        """Return the complete command."""
        passphrase = ["--passphrase-file", str(self.passphrase_file)] if self.passphrase_file else []
        return [*self.command, "join", *passphrase]


@dataclass(frozen=True)
class ServiceFile:
    """A configuration file for a service manager.

    Attributes:
        path: The file's path.
        content: The bytes, in the encoding that the service manager expects.
        text: The same content as text for display.
        start: Commands that start the service.
        remove: Commands that stop the service before the file is deleted.
        own_mark: Bytes that only the file of this home contains, regardless of its command.
    """

    path: Path
    content: bytes
    text: str
    start: list[str]
    remove: list[str]
    own_mark: bytes


def service_file(platform: Platform, service: ServiceJob, user_home: Path) -> ServiceFile:
    """Create the service file for a platform.

    Args:
        platform: The service manager's platform.
        service: The command.
        user_home: Home directory of the user.

    Raises:
        GymError: ``USAGE`` for a path that the file format cannot represent.
    """
    require_writable([*service.words(), str(service.home), *service.environment.values()])
    return {"linux": _systemd, "macos": _launchd, "windows": _task}[platform](service, user_home)


def require_writable(texts: Sequence[str]) -> None:
    """Check that words and paths can be written to service files.

    Raises:
        GymError: ``USAGE`` for control characters or bytes that are not UTF-8.
    """
    for text in texts:
        if not all(map(_is_writable, text)):
            raise GymError(
                ErrorCode.USAGE,
                f"{plain(text)} has control characters, or bytes that are not UTF-8",
                "choose a path without them",
            )


def _systemd(service: ServiceJob, user_home: Path) -> ServiceFile:
    path = user_home / ".config/systemd/user" / f"{_NAME}.service"
    program, *others = service.command
    begun = [_unit_quoted(program)]
    if set(program) & set(_NO_PROGRAM):
        begun = ["/usr/bin/env", _argument(program)]
    words = [*begun, *map(_argument, [*others, "join"])]
    if service.passphrase_file:
        words += ["--passphrase-file", f'"%d/{_CREDENTIAL}"']  # systemd writes the LoadCredential file there
    variables = {**service.environment, "GYM_HOME": str(service.home)}
    lines = [
        "[Unit]",
        "Description=gym-client: improves a shared model with your own data",
        "",
        "[Service]",
        f"ExecStart={' '.join(words)}",
        *(f"Environment={_unit_quoted(f'{name}={value}')}" for name, value in variables.items()),
    ]
    if service.passphrase_file:
        lines.append(f"LoadCredential={_CREDENTIAL}:{_unit_plain(service.passphrase_file)}")
    lines += [
        "Nice=10",
        "KillSignal=SIGINT",
        f"TimeoutStopSec={_STOP_SECONDS}",
        f"SuccessExitStatus={ErrorCode.INTERRUPTED.exit_code}",
        "Restart=on-failure",
        f"RestartSec={_RESTART_SECONDS}",
        f"RestartPreventExitStatus={' '.join(str(code.exit_code) for code in _FINAL)}",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    text = "\n".join(lines) + "\n"
    start = [
        "systemctl --user daemon-reload",
        f"systemctl --user enable --now {_NAME}.service",
        "loginctl enable-linger",
    ]
    remove = [f"systemctl --user disable --now {_NAME}.service"]
    own_mark = f"\nEnvironment={_unit_quoted(f'GYM_HOME={service.home}')}\n".encode()
    return ServiceFile(path, text.encode(), text, start, remove, own_mark)


def _unit_quoted(text: str) -> str:
    """Quote a word of a unit file, escaping systemd's specifiers."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _argument(text: str) -> str:
    """Quote an argument of a program, escaping the variables that systemd also expands there."""
    return _unit_quoted(text.replace("$", "$$"))


def _unit_plain(path: Path) -> str:
    """Return a path as an unquoted value that extends to the end of its line.

    Raises:
        GymError: ``USAGE`` for a path that systemd would truncate.
    """
    text = str(path)
    if text.endswith("\\") or text != text.strip():
        raise GymError(
            ErrorCode.USAGE,
            f"{plain(text)!r} ends with a backslash or a space, which systemd does not accept in a path",
            "rename the file",
        )
    return text.replace("%", "%%")


def _is_writable(character: str) -> bool:
    """Return True if all three file formats can represent a character; XML excludes U+FFFE and U+FFFF."""
    return unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp") and character not in "\ufffe\uffff"


def _launchd(service: ServiceJob, user_home: Path) -> ServiceFile:
    path = user_home / "Library/LaunchAgents" / f"{_LABEL}.plist"
    log = str(service.home / "service.log")
    content = plistlib.dumps(
        {
            "Label": _LABEL,
            # --service maps the exit codes, since launchd only distinguishes 0 from other codes.
            "ProgramArguments": [*service.words(), "--service"],
            "EnvironmentVariables": {**service.environment, "GYM_HOME": str(service.home)},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": _RESTART_SECONDS,
            "ExitTimeOut": _STOP_SECONDS,
            "ProcessType": "Background",
            "StandardOutPath": log,
            "StandardErrorPath": log,
        },
        sort_keys=False,
    )
    start = [f"launchctl bootstrap gui/$(id -u) {shlex.quote(str(path))}"]
    remove = [f"launchctl bootout gui/$(id -u)/{_LABEL}"]
    own_mark = f"<string>{escape(str(service.home))}</string>".encode()
    return ServiceFile(path, content, content.decode(), start, remove, own_mark)


def _task(service: ServiceJob, user_home: Path) -> ServiceFile:
    program, *arguments = service.words()
    arguments += ["--service", "--home", str(service.home)]  # a task cannot set environment variables
    for text in (program, *arguments):
        if re.search("%[^%]+%", text):
            raise GymError(
                ErrorCode.USAGE,
                f"{plain(text)}: Task Scheduler expands %...% as a variable, and it cannot be escaped",
                "choose a path without two percent signs",
            )
    ElementTree.register_namespace("", _TASK)
    task = ElementTree.Element(f"{{{_TASK}}}Task", version="1.2")
    triggers = _child(task, "Triggers")
    _child(_child(triggers, "LogonTrigger"), "Enabled", "true")
    settings = _child(task, "Settings")
    for name, value in (
        ("MultipleInstancesPolicy", "IgnoreNew"),
        ("DisallowStartIfOnBatteries", "false"),  # battery behaviour is set in policy.yaml
        ("StopIfGoingOnBatteries", "false"),
        ("ExecutionTimeLimit", "PT0S"),
    ):
        _child(settings, name, value)
    restart = _child(settings, "RestartOnFailure")
    _child(restart, "Interval", f"PT{_RESTART_SECONDS}S")
    _child(restart, "Count", "999")
    action = _child(_child(task, "Actions"), "Exec")
    _child(action, "Command", program)
    _child(action, "Arguments", subprocess.list2cmdline(arguments))
    text = ElementTree.tostring(task, encoding="unicode")
    path = service.home / f"{_NAME}-task.xml"
    content = f'<?xml version="1.0" encoding="UTF-16"?>\n{text}\n'
    start = [subprocess.list2cmdline(["schtasks", "/Create", "/TN", _NAME, "/XML", str(path)])]
    remove = [f"schtasks /Delete /TN {_NAME} /F"]
    return ServiceFile(path, content.encode("utf-16"), content, start, remove, b"")  # unneeded in the home


def _child(parent: ElementTree.Element, name: str, text: str | None = None) -> ElementTree.Element:
    child = ElementTree.SubElement(parent, f"{{{_TASK}}}{name}")
    child.text = text
    return child
