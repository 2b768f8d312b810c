"""Remove a variant from this machine: revisions and files, and rows and checkpoints of unfinished work."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.personalization.writer import WORK_FOLDER
from gym_fed.serving.store.records import validate_name

if TYPE_CHECKING:
    from gym_fed.serving.store.history import RemovedVariant

_REBASE = re.compile(r"\.rebase-[0-9a-f]{12}", re.ASCII)
_INCOMING = "incoming"


@dataclass(frozen=True)
class LocalRemoval:
    """The revisions and files removed from one store.

    Attributes:
        removed: The variant with its revisions; None if the store had none of this name.
        work: Deleted folders of unfinished work and files of interrupted pulls, relative to the store.
    """

    removed: RemovedVariant | None
    work: tuple[str, ...]


def remove_variant(folder: Path, name: str) -> LocalRemoval:
    """Remove a variant from a store, including data left by its creation or pulls.

    Args:
        folder: Folder of the store.
        name: Name of the variant; unfinished work without a variant is also removed.

    Raises:
        GymError: ``NOT_FOUND`` if neither exists; ``FILE_NOT_FOUND`` without a store; ``STATE_LOCKED`` while a
            process creates the variant; ``USAGE`` if a folder of the store is a link.
    """
    from gym_fed.serving.store.store import VariantStore

    validate_name(name)
    removed = None
    with VariantStore.open(folder, create=False, require_signature=False) as store:
        _require_idle(_work(store.folder, name))
        _pulls(store.folder, ())
        try:
            removed = store.remove(name)
        except GymError as error:
            if error.code is not ErrorCode.NOT_FOUND or not _work(store.folder, name):
                raise
        digests = () if removed is None else removed.unlinked
        left = [*_work(store.folder, name), *_pulls(store.folder, digests)]
        for path in left:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
    return LocalRemoval(removed, tuple(str(path.relative_to(store.folder)) for path in left))


def _work(folder: Path, name: str) -> list[Path]:
    """Return the folders of unfinished creates and rebases of this name."""
    return sorted(
        path
        for path in _entries(folder / WORK_FOLDER)
        if path.name == name
        or (path.name.startswith(f"{name}.") and _REBASE.fullmatch(path.name.removeprefix(name)))
    )


def _pulls(folder: Path, digests: tuple[str, ...]) -> list[Path]:
    """Return the files left by interrupted pulls of these deltas."""
    return sorted(path for path in _entries(folder / _INCOMING) if path.name.partition(".")[0] in digests)


def _entries(folder: Path) -> Iterable[Path]:
    """List a folder of the store, rejecting links, since they lead outside the store."""
    if folder.is_symlink():
        raise GymError(
            ErrorCode.USAGE,
            f"{folder} is a link, and nothing behind it is deleted",
            "delete what is there by hand, and the link; then repeat the command",
        )
    return folder.iterdir() if folder.is_dir() else ()


def _require_idle(work: Iterable[Path]) -> None:
    """Raise an error if a process trains below one of these folders."""
    from gym_fed.training.run.folder import LOCK_FILE, is_held

    for path in work:
        if any(is_held(lock.parent) for lock in path.rglob(LOCK_FILE)):
            raise GymError(
                ErrorCode.STATE_LOCKED, f"{path}: a process is working in it", "wait for it, or stop it"
            )
