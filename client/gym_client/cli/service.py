"""The commands `gym-client pause`, `resume`, `install-service`, `install-links` and `uninstall`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gym_client.cli.options import HomeFolder, PassphraseFile, open_home
from gym_fed.core.console import AsJson, print_result
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted

if TYPE_CHECKING:
    from gym_client.identity.home import Home


PlatformName = Annotated[
    str | None,
    typer.Option(
        "--platform",
        metavar="NAME",
        help="Operating system: linux, macos or windows.",
        show_default="this machine's",
    ),
]
OnlyPrint = Annotated[bool, typer.Option("--print", help="Print the file and write nothing.")]
DeleteFile = Annotated[bool, typer.Option("--uninstall", help="Delete the file.")]


def pause(home: HomeFolder = None, as_json: AsJson = False) -> None:
    """Pause the agent of this home. Training stops at its next checkpoint."""
    from gym_client.agent.pauses import set_paused

    folder = open_home(home, None)
    set_paused(folder)
    print_result(
        as_json, {"paused": True}, f"the agent of {folder.folder} is paused until `gym-client resume`"
    )


def resume(home: HomeFolder = None, as_json: AsJson = False) -> None:
    """Resume the agent of this home after a pause."""
    from gym_client.agent.pauses import set_resumed

    folder = open_home(home, None)
    set_resumed(folder)
    print_result(as_json, {"paused": False}, f"the agent of {folder.folder} resumes")


def install_service(
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    platform: PlatformName = None,
    only_print: OnlyPrint = False,
    uninstall: DeleteFile = False,
    as_json: AsJson = False,
) -> None:
    """Write the service file that runs `gym-client join` on this machine, on the terms accepted before."""
    from gym_client.service_files import platform_of, service_file, service_of
    from gym_fed.core.files import make_folder, write_atomically

    folder = open_home(home, passphrase_file)
    chosen = platform_of(platform)
    if not uninstall:
        _require_consent(folder)
        _require_unattended(folder, passphrase_file)
    file = service_file(chosen, service_of(folder, passphrase_file), Path.home())
    if uninstall:
        there = file.path.exists()
        file.path.unlink(missing_ok=True)
        outcome = f"deleted {file.path}" if there else f"{file.path} does not exist"
        commands = "\n".join(["to stop the service if it is still running:", *file.remove])
        print_result(
            as_json, {"path": str(file.path), "deleted": there, "commands": file.remove}, outcome, commands
        )
        return
    if not only_print:
        make_folder(file.path.parent)
        write_atomically(file.path, file.content)
    report = {"path": str(file.path), "written": not only_print, "content": file.text, "commands": file.start}
    place = f"{'would be written' if only_print else 'written'} to {file.path}; to start the service:"
    commands = "\n".join([place, *file.start])  # printed to standard error, since the file may be piped
    print_result(as_json, report, lambda: sys.stdout.write(file.text), note=commands)


def install_links(
    home: HomeFolder = None,
    passphrase_file: PassphraseFile = None,
    platform: PlatformName = None,
    only_print: OnlyPrint = False,
    uninstall: DeleteFile = False,
    as_json: AsJson = False,
) -> None:
    """Open invites with a click: gym:// links then open the page of `gym-client ui`, which asks before joining."""
    from gym_client.link_handler import link_handler, page_command
    from gym_client.service_files import platform_of

    folder, chosen = open_home(home, passphrase_file), platform_of(platform)
    handler = link_handler(chosen, folder.folder, page_command(folder, passphrase_file), Path.home())
    if chosen != platform_of(None) and not only_print:
        raise GymError(
            ErrorCode.USAGE,
            f"--platform {chosen} is not this machine's system",
            "add --print to only print the file",
        )
    report: dict[str, Any] = {"path": str(handler.path)}
    if uninstall:
        deleted = handler.remove()
        text = f"gym:// links {'no longer open' if deleted else 'did not open'} a page of this home"
        print_result(as_json, {**report, "deleted": deleted}, text)
        return
    if not only_print:
        handler.add()
    report = {**report, "written": not only_print, "content": handler.text}
    note = (
        "this file would register gym:// links" if only_print else "gym:// links now open a page of this home"
    )
    print_result(as_json, report, lambda: sys.stdout.write(handler.text), note=note)


def _require_consent(home: Home) -> None:
    """Require terms that were already accepted, since a service cannot prompt.

    Raises:
        GymError: ``USAGE`` if no hub was joined or no terms were accepted.
    """
    from gym_client.agent.agreement import has_agreed
    from gym_client.hub.known import last_address
    from gym_client.identity.pins import ServerPin

    address = last_address(home)
    pin = ServerPin.load(home, address) if address is not None else None
    if pin is None or not pin.contributor or not has_agreed(home, pin.server):
        raise GymError(
            ErrorCode.USAGE,
            f"no hub's terms were accepted in {home.folder} yet, and a service cannot prompt",
            "join once interactively, `gym-client join --server HOST --data FILE`, stop it, and repeat this command",
        )


def _require_unattended(home: Home, passphrase_file: Path | None) -> None:
    """Require a key that a service can load without a prompt.

    Raises:
        GymError: ``KEY_LOCKED`` otherwise.
    """
    from gym_client.identity.keystore import Keystore

    if passphrase_file is None and Keystore(home.folder).is_encrypted:
        raise GymError(
            ErrorCode.KEY_LOCKED,
            "the key of this home has a passphrase, but a service cannot prompt for it",
            "write the passphrase to a file with mode 0600 and pass --passphrase-file FILE, which the service reads",
        )


def uninstall(
    home: HomeFolder = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not prompt.")] = False,
    abandon: Annotated[
        bool, typer.Option("--abandon", help="Delete even without leaving a hub first; its account is lost.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete what gym-client wrote on this machine: key, receipts, downloads, service file and link handler."""
    from gym_client.cli.terminal import confirm
    from gym_client.removal import client_files_of, remove

    folder = open_home(home, None)
    removal = client_files_of(folder)
    removal.require_left(abandon)
    what = f"{counted(len(removal.files), 'entry')} in {folder.folder}"
    if removal.files and not yes:
        question = f"Delete {what}, including your private key? The key cannot be recreated."
        if not confirm(question, f"{what} would be deleted"):
            raise GymError(ErrorCode.USAGE, "nothing was deleted", "confirm it, or pass --yes")
    remove(folder, removal)
    print_result(
        as_json,
        {"deleted": list(map(str, removal.files)), "remaining": list(map(str, removal.others))},
        f"{what} deleted"
        + (f"; not deleted: {', '.join(path.name for path in removal.others)}" if removal.others else ""),
        note="to remove the program too: pip uninstall gym-fed",
    )
