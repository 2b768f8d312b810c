"""Write variants to a store, signed with their creator's key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder
from gym_fed.core.text import counted
from gym_fed.trust.identity.keys import SigningKey, load_or_create

if TYPE_CHECKING:
    from gym_fed.serving.store.records import VariantRecord
    from gym_fed.serving.store.store import VariantStore

KEY_FILE = "key.pem"
WORK_FOLDER = "making"


class VariantWriter:
    """A variant store with its creator's signing key.

    Args:
        folder: Folder of the store.
        key: The creator's key; None for a key of the store, created on first use (``key.pem``, mode 0600).
        unsigned: Do not sign variants.

    Raises:
        GymError: ``USAGE`` for a key combined with ``unsigned``.
    """

    def __init__(self, folder: Path, key: SigningKey | None = None, *, unsigned: bool = False) -> None:
        if unsigned and key is not None:
            raise GymError(ErrorCode.USAGE, "a key was given, but signing is off", "give one of the two")
        self.folder = folder
        self._given = key
        self._unsigned = unsigned

    @contextmanager
    def opened(self) -> Iterator[VariantStore]:
        """Open the store's registry without a base."""
        from gym_fed.serving.store.store import VariantStore

        with VariantStore.open(self.folder, require_signature=self.requires_signatures) as store:
            yield store

    def work_folder(self, name: str) -> Path:
        """Return the folder of a variant's unfinished work."""
        return self.folder / WORK_FOLDER / name

    @property
    def requires_signatures(self) -> bool:
        return not self._unsigned

    def variant_of(self, user_id: str) -> str:
        """Return the variant of that name, or the only one of that user.

        Raises:
            GymError: ``NOT_FOUND``, or ``USAGE`` with the names if the user has several variants.
        """
        with self.opened() as store:
            try:
                return store.get(user_id).name
            except GymError as error:
                if error.code is not ErrorCode.NOT_FOUND:
                    raise
            owned = [record.name for record in store.list(user_id)]
        if not owned:
            raise GymError(
                ErrorCode.NOT_FOUND,
                f"{user_id!r} has no variant in {self.folder}",
                "create_variant makes one",
            )
        if len(owned) > 1:
            raise GymError(
                ErrorCode.USAGE,
                f"{user_id!r} has {counted(len(owned), 'variant')}",
                f"name one of {', '.join(owned)}",
            )
        return owned[0]

    def planned_revision(self, name: str, user_id: str, *, replace: bool) -> int:
        """Return ``next_revision`` without creating a store."""
        from gym_fed.serving.store.records import validate_name, validate_owner

        if self.folder.exists():
            with self.opened() as store:
                return self.next_revision(store, name, user_id, replace=replace)
        validate_name(name)
        validate_owner(user_id)
        return 1

    def next_revision(self, store: VariantStore, name: str, user_id: str, *, replace: bool) -> int:
        """The revision for a new variant of a name.

        Raises:
            GymError: ``USAGE`` for a name or user id; ``FILE_EXISTS`` for a name that is taken and not to be replaced;
                ``PERMISSION_DENIED`` for another user's variant.
        """
        from gym_fed.serving.store.records import validate_name, validate_owner

        validate_name(name)
        validate_owner(user_id)
        try:
            variant = store.get(name)
        except GymError as error:
            if error.code is not ErrorCode.NOT_FOUND:
                raise
            return 1
        if variant.owner != user_id:
            raise GymError(
                ErrorCode.PERMISSION_DENIED,
                f"variant {name!r} is owned by {variant.owner}, and this would be {user_id}'s",
                "choose another name",
            )
        if not replace:
            raise GymError(
                ErrorCode.FILE_EXISTS,
                f"variant {name!r} exists (revision {variant.revision})",
                "pass replace (--replace) for its next revision, or choose another name",
            )
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
        """Sign a delta and add it as the user's; its figures stay in the store."""
        from gym_fed.serving.store.history import sign_variant

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
