"""The commands `gym-client pause`, `resume` and `install-service`."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gym_client.cli.options import HomeFolder, PassphraseFile, open_home
from gym_fed.core.child_process import module_command
from gym_fed.core.console import AsJson, print_result
from gym_fed.core.errors import ErrorCode, GymError

if TYPE_CHECKING:
    from gym_client.cli.service_files import Platform, ServiceJob
    from gym_client.identity.home import Home

_CARRIED = ("HOME", "HF_HOME")


def pause(home: HomeFolder = None, as_json: AsJson = False) -> None:
    """Pause the agent of this home. Training stops at its next checkpoint."""
    from gym_client.agent.pauses import set_paused

    folder = open_home(home, None)
    set_paused(folder)
    print_result(as_json, {"paused": True}, f"the agent of {folder.folder} waits until `gym-client resume`")


def resume(home: HomeFolder = None, as_json: AsJson = False) -> None:
    """Resume the agent of this home after a pause."""
    from gym_client.agent.pauses import set_resumed
    from gym_client.agent.policy import Policy

    folder = open_home(home, None)
    set_resumed(folder)
    if Policy.load(folder.policy_path).pause:
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"{folder.policy_path} has pause: true, so that the agent still waits",
            "remove the line",
        )
    print_result(as_json, {"paused": False}, f"the agent of {folder.folder} resumes")


def install_service(
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    platform: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Operating system: linux, macos or windows.", show_default="this machine's"
        ),
    ] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print the file and write nothing.")] = False,
    uninstall: Annotated[bool, typer.Option("--uninstall", help="Delete the file.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the service file that runs `gym-client join` on this machine, on the terms accepted before."""
    from gym_client.cli.service_files import service_file
    from gym_fed.core.files import make_folder, write_atomically

    folder = open_home(home, passphrase_file)
    chosen = _platform(platform)
    if not uninstall:
        _require_consent(folder)
        _require_unattended(folder, passphrase_file)
    file = service_file(chosen, _service(folder, passphrase_file), Path.home())
    if uninstall:
        there = file.path.exists()
        file.path.unlink(missing_ok=True)
        outcome = f"{file.path} is deleted" if there else f"there is no {file.path}"
        commands = "\n".join(["to stop a service that still runs:", *file.remove])
        print_result(
            as_json, {"path": str(file.path), "deleted": there, "commands": file.remove}, outcome, commands
        )
        return
    if not only_print:
        make_folder(file.path.parent)
        write_atomically(file.path, file.content)
    report = {
        "path": str(file.path),
        "written": not only_print,
        "content": file.text,
        "commands": file.start,
    }
    place = f"{'would be' if only_print else 'is'} in {file.path}; to start it:"
    commands = "\n".join([place, *file.start])  # on standard error, since the file may be piped
    print_result(as_json, report, lambda: sys.stdout.write(file.text), note=commands)


def _platform(given: str | None) -> Platform:
    known: dict[str, Platform] = {"linux": "linux", "macos": "macos", "windows": "windows"}
    here = {"darwin": "macos", "win32": "windows"}.get(sys.platform, "linux")
    chosen = known.get(given or here)
    if chosen is None:
        raise GymError(ErrorCode.USAGE, f"--platform {given!r}", f"take one of {', '.join(known)}")
    return chosen


def _require_consent(home: Home) -> None:
    """Require accepted terms, since a service cannot prompt.

    Raises:
        GymError: ``USAGE`` if no hub was joined, or no terms were accepted.
    """
    from gym_client.agent.agreement import has_agreed
    from gym_client.hub.known import last_address
    from gym_client.identity.pins import ServerPin

    address = last_address(home)
    pin = ServerPin.load(home, address) if address is not None else None
    if pin is None or not pin.contributor or not has_agreed(home, pin.server):
        raise GymError(
            ErrorCode.USAGE,
            f"{home.folder} has accepted no hub's terms yet, and a service cannot ask",
            "join once by hand, `gym-client join --server HOST --data FILE`, stop it, and repeat this command",
        )


def _require_unattended(home: Home, passphrase_file: Path | None) -> None:
    """Require a key that a service can use without a prompt.

    Raises:
        GymError: ``KEY_LOCKED``.
    """
    from gym_client.identity.keystore import Keystore

    if passphrase_file is None and Keystore(home.folder).is_encrypted:
        raise GymError(
            ErrorCode.KEY_LOCKED,
            "the key of this home has a passphrase, and a service cannot ask for it",
            "write it into a file of mode 0600 and pass --passphrase-file FILE; the service names the file",
        )


def _service(home: Home, passphrase_file: Path | None) -> ServiceJob:
    from gym_client.cli.service_files import ServiceJob

    carried = {name: os.environ[name] for name in _CARRIED if os.environ.get(name)}
    file = passphrase_file.expanduser().absolute() if passphrase_file else None
    return ServiceJob(_command(), home.folder, carried, file)


def _command() -> list[str]:
    """Return the `gym-client` command of this installation."""
    beside = Path(sys.executable).with_name("gym-client")
    if beside.is_file():
        return [str(beside)]
    program = shutil.which("gym-client")
    return [program] if program else module_command("gym_client.cli.main")
