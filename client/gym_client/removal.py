"""Remove what `gym-client` has written on this machine: its files, the service file and the link handler.

By default, `gym` keeps variants, models and datasets in the same folder. They are listed, but not deleted.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from gym_client.identity.home import Home
from gym_client.identity.pins import enrolled
from gym_client.link_handler import link_handler_of
from gym_client.service_files import written_files
from gym_fed.core.errors import ErrorCode, GymError

_OWN = (
    *("audits", "bases", "consents.json", "data", "instance", "jobs", "key.pem", "keys", "links.applescript"),
    *(
        "links.reg",
        "machine",
        "objects",
        "paused",
        "policy.yaml",
        "privacy.jsonl",
        "proofs",
        "receipts.jsonl",
    ),
    *("residuals", "secure", "seeding.json", "seeds", "servers", "service.log", "settings.json"),
    *("soups.json", "tasks", "traffic.json", "versions"),
)
"""Names of the client's files and folders in a home."""
_LOCK = "lock"


@dataclass(frozen=True)
class ClientFiles:
    """The files that `gym-client uninstall` deletes, and those that stay.

    Attributes:
        files: Files and folders of the client.
        others: Files and folders of other programs in the same folder, which stay.
        hubs: Names of the hubs where this home still has an account.
    """

    files: tuple[Path, ...]
    others: tuple[Path, ...]
    hubs: tuple[str, ...]

    def require_left(self, abandon: bool) -> None:
        """Check that no account would be lost together with the key, unless ``abandon`` is True.

        Raises:
            GymError: ``USAGE`` with the hubs where the account is still active.
        """
        if self.hubs and not abandon:
            raise GymError(
                ErrorCode.USAGE,
                f"this home still contributes to {', '.join(self.hubs)}, and its key cannot be recreated",
                "leave first: gym-client leave --server HOST; for a hub that is gone: --abandon",
            )


def client_files_of(home: Home) -> ClientFiles:
    """List the files to delete, without deleting anything."""
    hubs = tuple(pin.name or pin.address for pin in enrolled(home))  # first, as this may create a folder
    inside = sorted(home.folder.iterdir())
    links = link_handler_of(home)
    outside = [*written_files(home), *([links.path] if links.is_registered() else [])]
    own = [path for path in inside if path.name in _OWN or _has_only_filters(path)]
    files = (*own, *(path for path in outside if path not in own))
    others = tuple(path for path in inside if path not in files and path.name != _LOCK)
    return ClientFiles(files, others, hubs)


def _has_only_filters(path: Path) -> bool:
    """Return True for the folder of evaluations if it has only what joining a hub writes: filters of suites."""
    return path.name == "evals" and path.is_dir() and {one.name for one in path.iterdir()} <= {"filters"}


def remove(home: Home, removal: ClientFiles) -> None:
    """Delete the files, and then the home if it is empty.

    Raises:
        GymError: ``STATE_LOCKED`` while an agent of this home is running, or if another command has written into the
            home; errors from ``LinkHandler.remove``.
    """
    with home.locked():
        link_handler_of(home).remove()
        for path in removal.files:
            _delete(path)
    # Taking the lock has created its file, and a command that has not ended yet may have written others.
    for path in home.folder.iterdir():
        if path.name in (*_OWN, _LOCK):
            _delete(path)
    if removal.others:
        return
    if late := sorted(path.name for path in home.folder.iterdir()):
        raise GymError(
            ErrorCode.STATE_LOCKED,
            f"{home.folder}: {', '.join(late)} appeared during the deletion",
            "wait until other commands of this home have ended, and repeat",
        )
    home.folder.rmdir()


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
