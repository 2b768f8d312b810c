"""Write variants to a store, signed with the key of their creator, and remove them together with unfinished work."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder
from gym_fed.core.text import counted
from gym_fed.serving.store.records import validate_name, validate_owner
from gym_fed.trust.identity.keys import SigningKey, load_or_create

if TYPE_CHECKING:
    from gym_fed.serving.store.history import RemovedVariant
    from gym_fed.serving.store.records import VariantRecord
    from gym_fed.serving.store.store import VariantStore


KEY_FILE = "key.pem"
WORK_FOLDER = "making"
_REBASE = re.compile(r"\.rebase-[0-9a-f]{12}", re.ASCII)
_INCOMING = "incoming"


class VariantWriter:
    """A variant store and the signing key of the variants' creator.

    Args:
        key: The creator's key; None for a key of the store, created on first use (``key.pem``, mode 0600).
        unsigned: True to not sign variants.

    Raises:
        GymError: ``USAGE`` for a key combined with ``unsigned``.
    """

    def __init__(self, folder: Path, key: SigningKey | None = None, *, unsigned: bool = False) -> None:
        if unsigned and key is not None:
            raise GymError(
                ErrorCode.USAGE, "a key was given, but signing is disabled", "use only one of the two"
            )
        self.folder = folder
        self._given = key
        self._unsigned = unsigned

    @contextmanager
    def opened(self) -> Iterator[VariantStore]:
        """Open the store's registry within a context, without a base."""
        from gym_fed.serving.store.store import VariantStore

        with VariantStore.open(self.folder, require_signature=self.requires_signatures) as store:
            yield store

    def work_folder(self, name: str) -> Path:
        """Return the folder for the unfinished work on a variant."""
        return self.folder / WORK_FOLDER / name

    @property
    def requires_signatures(self) -> bool:
        return not self._unsigned

    def variant_of(self, user_id: str) -> str:
        """Return the variant with that name, or the only variant of that user.

        Raises:
            GymError: ``NOT_FOUND``; ``USAGE``, with the names, if the user has several variants.
        """
        with self.opened() as store:
            try:
                return store.get(user_id).name
            except GymError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
            owned = [record.name for record in store.list(user_id)]
        if not owned:
            reason = f"{user_id!r} has no variant in {self.folder}"
            raise GymError(ErrorCode.NOT_FOUND, reason, "create one with create_variant")
        if len(owned) > 1:
            reason = f"{user_id!r} has {counted(len(owned), 'variant')}"
            raise GymError(ErrorCode.USAGE, reason, f"choose one of {', '.join(owned)}")
        return owned[0]

    def planned_revision(self, name: str, user_id: str, *, replace: bool) -> int:
        """Return ``next_revision`` without creating a store."""
        if self.folder.exists():
            with self.opened() as store:
                return self.next_revision(store, name, user_id, replace=replace)
        validate_name(name)
        validate_owner(user_id)
        return 1

    def next_revision(self, store: VariantStore, name: str, user_id: str, *, replace: bool) -> int:
        """Return the revision number for a new variant with this name.

        Raises:
            GymError: ``USAGE`` for an invalid name or user id; ``FILE_EXISTS`` if the name is taken and must not be
                replaced; ``PERMISSION_DENIED`` for another user's variant.
        """
        validate_name(name)
        validate_owner(user_id)
        try:
            variant = store.get(name)
        except GymError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            return 1
        if variant.owner != user_id:
            reason = f"variant {name!r} is owned by {variant.owner}, not by {user_id}"
            raise GymError(ErrorCode.PERMISSION_DENIED, reason, "choose another name")
        if not replace:
            reason = f"variant {name!r} exists (revision {variant.revision})"
            remedy = "pass replace (--replace) for its next revision, or choose another name"
            raise GymError(ErrorCode.FILE_EXISTS, reason, remedy)
        return variant.revision + 1

    def put(
        self,
        store: VariantStore,
        delta: Path,
        name: str,
        user_id: str,
        *,
        revision: int,
        note: str,
        replace: bool,
        figures: Mapping[str, Any],
    ) -> VariantRecord:
        """Sign a delta and add it to the store for the user. Its metrics stay in the store."""
        from gym_fed.serving.store.signing import sign_variant

        signed = (
            None
            if self._unsigned
            else sign_variant(delta, self._key(), name=name, revision=revision, note=note)
        )
        return store.add(delta, signed, name=name, owner=user_id, replace=replace, figures=figures)

    def _key(self) -> SigningKey:
        if self._given is None:
            make_folder(self.folder, 0o700)
            self._given = load_or_create(self.folder / KEY_FILE)
        return self._given


@dataclass(frozen=True)
class LocalRemoval:
    """The revisions and files that were removed from one store.

    Attributes:
        removed: The variant with its revisions; None if the store had no variant with this name.
        work: Deleted folders of unfinished work and files of interrupted pulls, relative to the store.
    """

    removed: RemovedVariant | None
    work: tuple[str, ...]


def remove_variant(folder: Path, name: str) -> LocalRemoval:
    """Remove a variant from a store, including data left by its creation or by pulls.

    Args:
        name: Name of the variant. Unfinished work is removed even if there is no variant.

    Raises:
        GymError: ``NOT_FOUND`` if there is neither; ``FILE_NOT_FOUND`` without a store; ``STATE_LOCKED`` while a
            process is creating the variant; ``USAGE`` if a folder of the store is a link.
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
    """Return the folders of unfinished creations and rebases with this name."""
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
    """List a folder of the store. Links are rejected, since they lead outside the store."""
    if folder.is_symlink():
        reason = f"{folder} is a link; nothing behind it was deleted"
        remedy = "delete its target and the link manually, and run the command again"
        raise GymError(ErrorCode.USAGE, reason, remedy)
    return folder.iterdir() if folder.is_dir() else ()


def _require_idle(work: Iterable[Path]) -> None:
    """Raise an error if a process is training in one of these folders."""
    from gym_fed.training.run.folder import LOCK_FILE, is_held

    for path in work:
        if any(is_held(lock.parent) for lock in path.rglob(LOCK_FILE)):
            raise GymError(
                ErrorCode.STATE_LOCKED, f"{path}: another process is using it", "wait for it, or stop it"
            )
