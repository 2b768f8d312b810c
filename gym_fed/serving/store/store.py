"""The variant store: variants are added, replaced and removed at run time, and verified before use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.failpoints import failpoint
from gym_fed.core.files import make_folder
from gym_fed.core.text import counted
from gym_fed.serving.store.bulk import BulkAddition, IncomingVariant, Progress
from gym_fed.serving.store.history import RemovedVariant, VariantHistory, as_text, ignoring_damage
from gym_fed.serving.store.loading import Loader, TokenLists, least_bytes, load_variant
from gym_fed.serving.store.objects import DeltaObjects
from gym_fed.serving.store.records import VariantRecord, validate_name, validate_owner
from gym_fed.serving.store.registry import VariantRegistry
from gym_fed.serving.store.variant_cache import StoreStats, VariantCache
from gym_fed.serving.store.verification import admit_key, check_replaceable, describe, numbered, open_verified
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.variant import SignedVariant

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.serving.forward.target_modules import ModelLayout
    from gym_fed.serving.forward.variant_weights import LoadedVariant, VariantTokens

DEFAULT_CACHE_BYTES = 10 * 10**9


class VariantStore:
    """A folder of variants: ``variants.db``, ``objects/`` and ``staging/``. Use as a context manager, or ``close`` it.

    It is a ``gym_fed.serving.forward.variant_weights.VariantSource``. Several processes may use one folder. Each of
    them sees the others' changes immediately, since every request looks up its variant's row. A variant that is removed
    or replaced while it is in use stays in memory only for its current users.
    """

    def __init__(
        self,
        folder: Path,
        *,
        base: BaseSpec | None,
        layout: ModelLayout | None,
        cache_bytes: int,
        require_signature: bool,
        loader: Loader | None,
    ) -> None:
        """Use ``open``."""
        self.folder = folder
        self.require_signature = require_signature
        self._base = base
        self._layout = layout
        self._loader = loader or load_variant
        self._objects = DeltaObjects(folder)
        self._registry = VariantRegistry(folder / "variants.db")
        self.history = VariantHistory(self._registry, self._objects)
        self._tokens = TokenLists(self._objects.path, base)
        self._cache = VariantCache(
            self._page_in,
            cache_bytes,
            fingerprint=lambda record: self._objects.identity(record.sha256),
            least_bytes=lambda record: least_bytes(self._objects.path(record.sha256), base, layout),
        )

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        base: BaseSpec | None = None,
        layout: ModelLayout | None = None,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        require_signature: bool = True,
        create: bool = True,
        loader: Loader | None = None,
    ) -> VariantStore:
        """Open a store; this reads only one page of its database.

        Args:
            folder: The store's folder.
            base: The base of all variants; None: variants of any base can be registered, but not loaded.
            layout: The ``ModelLayout`` of the served model.
            cache_bytes: Maximum size in bytes of variants in memory.
            require_signature: Whether to refuse unsigned variants, when they are added and before use.
            create: Whether to create the folder if it does not exist.
            loader: Function that converts an open delta to the model's in-memory form.

        Raises:
            GymError: ``FILE_NOT_FOUND`` with ``create=False``; ``USAGE`` for a file; ``STATE_CORRUPT``.
        """
        path = Path(folder).expanduser().absolute()
        if not create and not (path / "variants.db").is_file():
            raise GymError(
                ErrorCode.FILE_NOT_FOUND,
                f"no variant store at {path}",
                "correct the path, or create a store: gym variant create, pull or add",
            )
        if not path.is_dir():
            try:
                make_folder(path, 0o700)
            except (FileExistsError, NotADirectoryError) as error:
                raise GymError(
                    ErrorCode.USAGE, f"a variant store must be a folder, but {error.filename} is a file"
                ) from error
        return cls(
            path,
            base=base,
            layout=layout,
            cache_bytes=cache_bytes,
            require_signature=require_signature,
            loader=loader,
        )

    # ---- the registry ----

    def add(
        self,
        delta: str | Path,
        signed: SignedVariant | None = None,
        *,
        name: str,
        owner: str,
        replace: bool = False,
        note: str = "",
        figures: Mapping[str, Any] | None = None,
    ) -> VariantRecord:
        """Copy a delta into the store, and register it; on return it is durable and visible to every process.

        A plain user id has no key of its own: only the first key that signs for it in this store may then sign for it
        (``trust`` adds others). A signed variant is replaced only by a signed one with a higher revision. Adding the
        current manifest again repairs a damaged file, and changes nothing else.

        Args:
            delta: The `.gymdelta`.
            signed: The manifest with its signature; None: unsigned, which ``require_signature`` refuses.
            name: The name to serve it as.
            owner: An account's id, or a plain user id.
            replace: Whether to replace the owner's variant with this name, if there is one.
            note: A comment for people on an unsigned variant; that of a signed one is in its manifest.
            figures: Measurements for its history, such as losses; they stay in this store.

        Raises:
            GymError: ``USAGE`` for a name or owner; ``FILE_EXISTS`` without ``replace``; ``PERMISSION_DENIED`` for
                another owner's name; ``REPLAYED`` or ``STALE`` for a revision that is not higher;
                ``SIGNATURE_INVALID``, ``KEY_REVOKED``, ``HASH_MISMATCH``; ``DISK_FULL``; errors from
                ``DeltaFile.open``.
        """
        validate_name(name)
        validate_owner(owner)
        if signed is None and self.require_signature:
            raise GymError(
                ErrorCode.SIGNATURE_INVALID,
                f"variant {name!r} is not signed, but this store requires signatures",
                "sign it, or open the store so that it accepts unsigned variants",
            )
        if signed is not None and note:
            raise GymError(
                ErrorCode.USAGE, "a signed variant's note belongs in its manifest", "sign it with the note"
            )
        with self._objects.staged(Path(delta)) as staged:
            record = describe(
                staged, Path(delta), signed, self._base, self._layout, name=name, owner=owner, note=note
            )
            failpoint("variant-staged")
            with self._registry.writing() as transaction:
                before = transaction.get(name)
                if before is not None:
                    check_replaceable(before, record, replace)
                admit_key(transaction, record, signed)
                self._objects.adopt(staged)
                if before is not None and before.manifest is not None and before.manifest == record.manifest:
                    return before
                record = numbered(record, before, signed)
                gone = transaction.put(record, as_text(figures))
                failpoint("variant-before-commit")
        failpoint("variant-committed")
        self._forget(gone)
        return record

    def add_all(
        self,
        variants: Sequence[IncomingVariant],
        key: SigningKey | None = None,
        *,
        replace: bool = False,
        progress: Progress | None = None,
    ) -> list[VariantRecord]:
        """Sign and add many variants in one transaction; none is added if one is refused.

        Args:
            variants: The variants; identical files are checked and stored once.
            key: The key that signs each variant; None: unsigned, which ``require_signature`` refuses.
            replace: See ``add``.
            progress: Called with the current step, the number of items done, and their total.

        Raises:
            GymError: See ``add``; it names every refused file, and has the code of the first.
        """
        if key is None and self.require_signature:
            raise GymError(
                ErrorCode.SIGNATURE_INVALID,
                f"{counted(len(variants), 'variant')} cannot be added without a signature, which this store requires",
                "pass a key, or open the store so that it accepts unsigned variants",
            )
        addition = BulkAddition(
            self._objects, self._registry, self._base, self._layout, key, replaces=replace, progress=progress
        )
        records, gone = addition.add(variants)
        self._forget(gone)
        return records

    def remove(self, name: str) -> RemovedVariant:
        """Unregister a variant and all its revisions, and unlink their files.

        Running requests finish; new ones are refused. Its revision numbers are deleted too, so a user with write access
        to this folder can then add an older revision.

        Raises:
            GymError: ``NOT_FOUND``.
        """
        with self._registry.writing() as transaction:
            records: list[VariantRecord] = []
            with ignoring_damage():
                records = [record for record, _ in transaction.revisions(name)]
            with ignoring_damage():
                if transaction.get(name) is None:
                    raise _unknown(name)
            digests = transaction.delete(name)
        failpoint("variant-removed")
        shared = self._forget(digests)
        self._registry.forget_pages()
        self._cache.retire(name)
        return RemovedVariant(name, tuple(records), tuple(sorted(digests - shared)), tuple(sorted(shared)))

    def get(self, name: str) -> VariantRecord:
        """Return the row of a variant.

        Raises:
            GymError: ``NOT_FOUND``; ``STATE_CORRUPT`` for a damaged row.
        """
        record = self._registry.get(name)
        if record is None:
            raise _unknown(name)
        return record

    def list(self, owner: str | None = None) -> Iterator[VariantRecord]:
        """Iterate over all variants by name, or those of an owner, reading one page at a time.

        A damaged row is logged and skipped; ``get`` and ``verify`` refuse it by name.
        """
        return self._registry.list(owner)

    def names(self) -> Iterator[str]:
        """Yield all names, including those of damaged rows."""
        return self._registry.names()

    def count(self) -> int:
        """Return the number of registered variants."""
        return self._registry.count()

    def path(self, name: str) -> Path:
        """Return the path of a variant's `.gymdelta`; do not write to it.

        Raises:
            GymError: ``NOT_FOUND``.
        """
        return self._objects.path(self.get(name).sha256)

    def trust(self, owner: str, public_key: bytes) -> None:
        """Allow another key to sign for an owner, such as the newer key of a rotated account or a user's second key.

        Raises:
            GymError: ``KEY_REVOKED`` for a key that was revoked in this store.
        """
        validate_owner(owner)
        self._registry.set_key(owner, public_key, revoked=False)

    def revoke(self, owner: str, public_key: bytes) -> None:
        """Permanently refuse all variants that this key signed for the owner."""
        validate_owner(owner)
        self._registry.set_key(owner, public_key, revoked=True)

    def verify(self, name: str) -> VariantRecord:
        """Check a variant on disk: hash, format, base, manifest and signature.

        Raises:
            GymError: With the variant, the file and a remedy.
        """
        record = self.get(name)
        open_verified(
            record,
            self._objects,
            self._registry,
            self._base,
            require_signature=self.require_signature,
            again=True,
        ).close()
        return record

    def gc(self) -> tuple[int, int]:
        """Remove revisions beyond the number to keep, and leftover files; return the numbers of files and bytes.

        Objects can be removed immediately, since additions wait meanwhile; unfinished copies are left for an hour.
        """
        with self._registry.writing() as transaction:
            transaction.prune()
        with (
            self._registry.writing() as transaction
        ):  # separate, so that the rows are gone even if this fails
            return self._objects.collect(transaction.is_used)

    # ---- for the engine ----

    def prefetch(self, name: str, user: str = "") -> None:
        """Start loading a variant, unless other variants need the memory. Raises the errors of ``get``."""
        self._cache.prefetch(self._servable(name), user)

    def poll(self, name: str, user: str = "") -> LoadedVariant | None:
        """Return the variant, pinned until ``release``, if it is in memory; otherwise start its load and return None.

        A failed load is reported for some seconds, or until the row or file changes, and then tried again.

        Raises:
            GymError: ``NOT_FOUND``; or why it cannot be loaded, naming variant, file and remedy.
        """
        return self._cache.poll(self._servable(name), user)

    def added_tokens(self, name: str) -> VariantTokens | None:
        """Return the tokens that a variant adds to the base's tokenizer, or None. Raises the errors of ``get``."""
        return self._tokens.of(self._servable(name).sha256)

    def lacks_room(self, name: str) -> bool:
        """Return True if a variant's load waits for variants in use to be released."""
        return self._cache.lacks_room(name)

    def acquire(self, name: str) -> LoadedVariant:
        """Wait for the variant, and return it, pinned until ``release``. Raises the errors of ``poll``."""
        while True:
            loaded = self._cache.acquire(self._servable(name))
            if loaded is not None:
                return loaded

    def release(self, variant: LoadedVariant) -> None:
        """Unpin one use of a variant.

        Raises:
            GymError: ``USAGE`` if it is not in use.
        """
        self._cache.release(variant)

    def stats(self) -> StoreStats:
        """Return the cache's statistics, without accessing the disk."""
        return self._cache.stats()

    def close(self) -> None:
        self._cache.close()
        self._registry.close()

    def __enter__(self) -> VariantStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self, digests: set[str]) -> set[str]:
        """Remove the objects that a committed change left unused, like ``gc`` after a kill; return the others."""
        if not digests:
            return set()
        with self._registry.writing() as transaction:
            used = {sha256 for sha256 in digests if transaction.is_used(sha256)}
            for sha256 in digests - used:
                self._objects.forget(sha256)
        return used

    def _servable(self, name: str) -> VariantRecord:
        record = self._registry.get(name)
        if record is None:
            self._cache.retire(name)
            raise _unknown(name)
        if self._base is None:
            raise GymError(ErrorCode.USAGE, "the variant store was opened without a base", "open it with one")
        return record

    def _page_in(self, record: VariantRecord, shared: LoadedVariant | None) -> LoadedVariant:
        delta = open_verified(
            record, self._objects, self._registry, self._base, require_signature=self.require_signature
        )
        with delta:
            return shared or self._loader(record.name, delta, self._layout, record.sha256)


def _unknown(name: str) -> GymError:
    return GymError(ErrorCode.NOT_FOUND, f"no variant {name[:80]!r}")
