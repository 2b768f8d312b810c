"""Register `gym-client ui` as the program that opens ``gym://`` links, on Linux, macOS and Windows.

A link is passed as an argument after ``--``, so no part of it is read as an option. The page shows the invite in the
link; joining requires the same consent as for a pasted invite. Nothing outside the user's own folders is changed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gym_client.identity.home import Home
from gym_client.service_files import Platform, client_command, platform_of, require_writable
from gym_fed.core.child_process import run_process
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, real_path, write_atomically
from gym_fed.core.text import plain

SCHEME = "gym"
_NAME = "gym-client-links"
_TITLE = "gym-fed: open an invite"
_COMMAND_SECONDS = 60.0
_SAFE_WORD = re.compile(r"[\w@%+=:,./-]+", re.ASCII)
"""Words that need no quotes in an ``Exec`` line; the plain ``xdg-open`` does not understand quotes."""


@dataclass(frozen=True)
class LinkHandler:
    """The registration that makes a platform open links with the page of a home.

    Attributes:
        path: A file that contains ``own_mark`` if the links are registered for this home.
        content: The bytes of that file.
        text: The same content as text for display.
        register: Commands to run after the file is written.
        unregister: Commands to run when the file is deleted.
        own_mark: Bytes that only the file of this home contains; empty if the file is in the home.
        defaults: A list of default programs that contains ``default_line`` for this handler; None if there is none.
        default_line: The line of this handler in ``defaults``.
    """

    path: Path
    content: bytes
    text: str
    register: Sequence[Sequence[str]]
    unregister: Sequence[Sequence[str]]
    own_mark: bytes = b""
    defaults: Path | None = None
    default_line: str = ""

    def is_registered(self) -> bool:
        """Return True if links open the page of this home."""
        try:
            return self.own_mark in self.path.read_bytes()
        except OSError:
            return False

    def add(self) -> None:
        """Register the handler.

        Raises:
            GymError: ``MISSING_DEPENDENCY`` for a program that is not installed, before anything is written, or for a
                program that fails.
        """
        _require_programs(self.register)
        make_folder(self.path.parent)
        write_atomically(self.path, self.content)
        for words in self.register:
            _run(words)

    def remove(self) -> bool:
        """Undo the registration. Return False if this home was not registered.

        Raises:
            GymError: As in ``add``. The file is deleted even then, so that a second call does not fail.
        """
        if not self.is_registered():
            return False
        if self.defaults is not None and self.defaults.exists():
            lines = self.defaults.read_bytes().splitlines(keepends=True)  # other lines may have any encoding
            others = [line for line in lines if line.rstrip(b";\r\n") != self.default_line.encode()]
            write_atomically(real_path(self.defaults), b"".join(others))
        self.path.unlink()
        for words in self.unregister:
            _run(words)
        return True


def link_handler_of(home: Home, passphrase_file: Path | None = None) -> LinkHandler:
    """Return the link handler of a home for this machine's platform."""
    return link_handler(platform_of(None), home.folder, page_command(home, passphrase_file), Path.home())


def link_handler(platform: Platform, home: Path, command: Sequence[str], user_home: Path) -> LinkHandler:
    """Create the link handler of a home for a platform.

    Args:
        platform: The platform.
        home: The contributor's home.
        command: The command, to which the link is appended as the last argument.
        user_home: Home directory of the user.

    Raises:
        GymError: ``USAGE`` for a path that the registration cannot represent.
    """
    require_writable([*command, str(home), str(user_home)])
    return {"linux": _desktop_entry, "macos": _applet, "windows": _registry_file}[platform](
        home, command, user_home
    )


def page_command(home: Home, passphrase_file: Path | None) -> list[str]:
    """Return the command for a page that exits when it is closed, since no terminal is visible."""
    words = [*client_command(), "ui", f"--home={home.folder}", "--port=0", "--open", "--until-closed"]
    if passphrase_file is not None:
        words.append(f"--passphrase-file={passphrase_file.expanduser().absolute()}")
    return words


def _desktop_entry(home: Path, command: Sequence[str], user_home: Path) -> LinkHandler:
    """Create the desktop entry for Linux (freedesktop.org's Desktop Entry Specification 1.5)."""
    data = Path(os.environ.get("XDG_DATA_HOME") or user_home / ".local/share")
    config = Path(os.environ.get("XDG_CONFIG_HOME") or user_home / ".config")
    path = data / "applications" / f"{_NAME}.desktop"
    scheme = f"x-scheme-handler/{SCHEME}"
    mark = f"X-Gym-Home={_entry_text(str(home))}"
    lines = [
        "[Desktop Entry]",
        "Type=Application",
        f"Name={_TITLE}",
        f"Exec={_entry_text(' '.join([*map(_entry_word, command), '--', '%u']))}",
        f"MimeType={scheme};",
        "NoDisplay=true",
        "Terminal=false",
        mark,
    ]
    text = "\n".join(lines) + "\n"
    return LinkHandler(
        path,
        text.encode(),
        text,
        register=[["xdg-mime", "default", path.name, scheme]],
        unregister=[],
        own_mark=f"\n{mark}\n".encode(),
        defaults=config / "mimeapps.list",  # xdg-mime writes the line, but has no command to remove it
        default_line=f"{scheme}={path.name}",
    )


def _entry_word(word: str) -> str:
    """Quote a word of an ``Exec`` line, where ``%`` begins a field code."""
    doubled = word.replace("%", "%%")
    if _SAFE_WORD.fullmatch(word):
        return doubled
    return '"' + re.sub(r'(["`$\\])', r"\\\1", doubled) + '"'


def _entry_text(text: str) -> str:
    """Escape a value of a desktop entry, in addition to the quotes of an ``Exec`` line."""
    return text.replace("\\", "\\\\")


def _applet(home: Path, command: Sequence[str], user_home: Path) -> LinkHandler:
    """Create the applet for macOS, which passes links to applications as events, never as arguments."""
    app = user_home / "Applications" / f"{_NAME}.app"
    info = str(app / "Contents/Info.plist")
    path = home / "links.applescript"
    shell = f"{shlex.join(command)} -- "
    quoted = shell.replace("\\", "\\\\").replace('"', '\\"')
    text = (
        "on open location this_link\n"
        f'\tdo shell script "{quoted}" & quoted form of this_link & " > /dev/null 2>&1 &"\n'
        "end open location\n"
    )
    types = [{"CFBundleURLName": _TITLE, "CFBundleURLSchemes": [SCHEME]}]
    services = "/System/Library/Frameworks/CoreServices.framework/Frameworks/LaunchServices.framework"
    return LinkHandler(
        path,
        text.encode(),
        text,
        register=[
            ["mkdir", "-p", str(app.parent)],
            ["osacompile", "-o", str(app), str(path)],
            ["plutil", "-replace", "CFBundleIdentifier", "-string", "org.gym-fed.links", info],
            ["plutil", "-replace", "CFBundleURLTypes", "-json", json.dumps(types), info],
            [
                "codesign",
                "--force",
                "--sign",
                "-",
                str(app),
            ],  # sign again, since the property list was changed
            [f"{services}/Support/lsregister", "-f", str(app)],
        ],
        unregister=[["rm", "-rf", str(app)]],
    )


def _registry_file(home: Path, command: Sequence[str], user_home: Path) -> LinkHandler:
    """Create the registry file for Windows, which changes only the user's own classes."""
    for word in command:
        if "%" in word:
            raise GymError(
                ErrorCode.USAGE,
                f"{plain(word)}: Windows expands % in a command, and it cannot be escaped",
                "choose a path without a percent sign",
            )
    key = f"HKEY_CURRENT_USER\\Software\\Classes\\{SCHEME}"
    path = home / "links.reg"
    run = f'{subprocess.list2cmdline(command)} -- "%1"'.replace("\\", "\\\\").replace('"', '\\"')
    text = (
        "Windows Registry Editor Version 5.00\r\n\r\n"
        f'[{key}]\r\n@="URL:{_TITLE}"\r\n"URL Protocol"=""\r\n\r\n'
        f'[{key}\\shell\\open\\command]\r\n@="{run}"\r\n'
    )
    return LinkHandler(
        path,
        b"\xff\xfe" + text.encode("utf-16-le"),  # regedit requires the byte order mark
        text,
        register=[["reg", "import", str(path)]],
        unregister=[["reg", "delete", key, "/f"]],
    )


def _require_programs(commands: Sequence[Sequence[str]]) -> None:
    for program, *_ in commands:
        if shutil.which(program) is None:
            package = " (package xdg-utils)" if program == "xdg-mime" else ""
            raise GymError(
                ErrorCode.MISSING_DEPENDENCY,
                f"{program}, which registers links, is not installed on this machine",
                f"paste invites on the page instead, or install {program}{package}",
            )


def _run(words: Sequence[str]) -> None:
    try:
        program = (
            shutil.which(words[0]) or words[0]
        )  # Windows runs a bare name from the working directory first
        done = run_process([program, *words[1:]], text=True, timeout=_COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GymError(ErrorCode.MISSING_DEPENDENCY, f"{words[0]}: {error}") from error
    if done.returncode:
        raise GymError(
            ErrorCode.MISSING_DEPENDENCY,
            f"{shlex.join(words)} ended with code {done.returncode}: {plain(done.stderr.strip())}",
        )
