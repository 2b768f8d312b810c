"""Check a delta before it becomes a variant, replaces one, or is used.

The bytes, base, manifest and owner's signature of a variant are checked before it is used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.base.media_parts import PROJECTOR, TOWER, part_of
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.delta.added_tokens import require_servable_tokens
from gym_fed.serving.store.objects import DeltaObjects, Staged
from gym_fed.serving.store.records import VariantRecord, is_account
from gym_fed.serving.store.registry import Transaction, VariantRegistry
from gym_fed.trust.identity.keys import contributor_id
from gym_fed.trust.identity.variant import SignedVariant

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.file import DeltaFile
    from gym_fed.serving.forward.target_modules import ModelLayout


def describe(
    staged: Staged,
    source: Path,
    signed: SignedVariant | None,
    base: BaseSpec | None,
    layout: ModelLayout | None,
    *,
    name: str,
    owner: str,
    note: str,
) -> VariantRecord:
    """Check a delta and its manifest, and return its row.

    Args:
        staged: The store's own copy.
        source: The original file, for messages.
        signed: The manifest; None if unsigned.
        base: The base that it must belong to; None: any.
        layout: The layout of the served model; None if unknown.
        name: The name to serve it as.
        owner: The owner's id.
        note: The note, for an unsigned variant.

    Raises:
        GymError: ``HASH_MISMATCH``, ``SIGNATURE_INVALID``; errors from ``DeltaFile.open``.
    """
    if signed is not None and signed.manifest.delta_sha256 != staged.sha256:
        raise GymError(
            ErrorCode.HASH_MISMATCH,
            f"{source} hashes to {staged.sha256}, but the manifest of {name!r} has {signed.manifest.delta_sha256}",
            "use the file that was signed",
        )
    checked = checked_base(staged, source, base, layout)
    return row_of(staged, checked, signed, name=name, owner=owner, note=note)


def checked_base(
    staged: Staged, source: Path, base: BaseSpec | None, layout: ModelLayout | None
) -> tuple[str, str]:
    """Check a delta including its values, and return the name and digest of its base.

    Raises:
        GymError: ``MODEL_INVALID`` for a delta that changes more than the language model, has too much text in its
            added tokens, or cannot be added to the served model; errors from ``DeltaFile.open``. All name ``source``.
    """
    from gym_fed.delta.file import DeltaFile

    try:
        with DeltaFile.open(staged.path, base, added_tokens=True) as opened:
            require_servable_tokens(opened.vocabulary, str(staged.path))
            _require_language_model(staged.path, [record.name for record in opened.manifest.tensors])
            if layout is not None:
                from gym_fed.serving.forward.variant_weights import require_servable_delta

                require_servable_delta(opened, layout)
            return opened.manifest.base_model, opened.manifest.base_digest
    except GymError as error:
        message = error.message.replace(str(staged.path), str(source))
        raise GymError(error.code, message, error.hint) from error


def _require_language_model(path: Path, names: Sequence[str]) -> None:
    """Refuse a delta that changes the model's parts for pictures or audio, whose features all requests share.

    The parts are recognised by name, since the base may not be on this machine. The server, which has it, checks again.
    """
    others = [name for name in names if part_of(name) in (TOWER, PROJECTOR)]
    if others:
        raise GymError(
            ErrorCode.MODEL_INVALID,
            f"{path}: {counted(len(others), 'tensor')} cannot be served, such as {others[0]!r}: a variant "
            "can change only the language model",
            "remove these tensors from the delta, or merge the delta and serve the merged model",
        )


def row_of(
    staged: Staged, base: tuple[str, str], signed: SignedVariant | None, *, name: str, owner: str, note: str
) -> VariantRecord:
    """Create the row of a checked delta, which must agree with its manifest.

    Raises:
        GymError: ``SIGNATURE_INVALID``.
    """
    now = int(time.time())
    record = VariantRecord(
        name=name,
        owner=owner,
        sha256=staged.sha256,
        size_bytes=staged.size_bytes,
        base_model=base[0],
        base_digest=base[1],
        revision=1 if signed is None else signed.manifest.revision,
        created_at=now,
        updated_at=now,
        manifest=None if signed is None else signed.to_json(),
        note=note if signed is None else signed.manifest.note,
    )
    if signed is not None:
        try:
            check_manifest(record, signed)
        except GymError as error:
            raise GymError(error.code, f"variant {name!r}: {error.message}", error.hint) from error
    return record


def admit_key(transaction: Transaction, record: VariantRecord, signed: SignedVariant | None) -> None:
    """Check that the key may sign for the owner; the first key of a plain user id is recorded.

    Raises:
        GymError: ``SIGNATURE_INVALID`` or ``KEY_REVOKED``.
    """
    if signed is None:
        return
    key, owner = signed.public_key, record.owner
    if not is_account(owner) and not transaction.has_keys(owner):
        transaction.set_key(owner, key, revoked=False)
    try:
        check_key(signed, owner, transaction.key_state(owner, key))
    except GymError as error:
        hint = "sign it with a newer key"
        if error.code is ErrorCode.SIGNATURE_INVALID:
            hint = f"if the key is {owner}'s: gym variant trust {owner} {key.hex()}"
        raise GymError(error.code, f"variant {record.name!r} {error.message}", hint) from error


def check_replaceable(before: VariantRecord, new: VariantRecord, replaces: bool) -> None:
    """Check that a row may replace another.

    Raises:
        GymError: ``PERMISSION_DENIED``, ``FILE_EXISTS``, ``SIGNATURE_INVALID``, ``REPLAYED`` or ``STALE``.
    """
    name = before.name
    if before.owner != new.owner:
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"variant {name!r} belongs to {before.owner}, not to {new.owner}",
            "use another name, or remove it first",
        )
    if not replaces:
        raise GymError(ErrorCode.FILE_EXISTS, f"variant {name!r} exists", "use another name, or replace it")
    if before.manifest is None or before.manifest == new.manifest:
        return
    if new.manifest is None:
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"variant {name!r} is signed, so an unsigned one cannot replace it",
            "sign it, or remove the old one first",
        )
    if new.revision == before.revision:
        raise GymError(
            ErrorCode.REPLAYED,
            f"variant {name!r} already has revision {before.revision}",
            "sign the new one with a higher revision",
        )
    if new.revision < before.revision:
        raise GymError(
            ErrorCode.STALE,
            f"variant {name!r} is at revision {before.revision}, but revision {new.revision} is older",
            "sign the new one with a higher revision",
        )


def numbered(
    record: VariantRecord, before: VariantRecord | None, signed: SignedVariant | None
) -> VariantRecord:
    """Return the record with the creation time of the previous one and, if it is unsigned, the next revision number."""
    if before is None:
        return record
    revision = record.revision if signed is not None else before.revision + 1
    return replace(record, created_at=before.created_at, revision=revision)


_RESTORE_HINT = (
    "pull it again, create it again with `gym variant create --replace`, "
    "or add a copy with `gym variant add --replace`"
)
_REMEDIES = {
    ErrorCode.FILE_NOT_FOUND: f"{_RESTORE_HINT}, or remove it",
    ErrorCode.HASH_MISMATCH: f"it was changed on disk: {_RESTORE_HINT}",
    ErrorCode.BASE_MISMATCH: "serve the base that it was made for, or move it with `gym variant rebase`",
    ErrorCode.DELTA_INVALID: "create or pull it again",
    ErrorCode.SIGNATURE_INVALID: "have its owner sign it again: `gym variant add --sign --replace`",
    ErrorCode.KEY_REVOKED: "have its owner sign it again with the new key",
}


def open_verified(
    record: VariantRecord,
    objects: DeltaObjects,
    registry: VariantRegistry,
    base: BaseSpec | None,
    *,
    require_signature: bool,
    again: bool = False,
) -> DeltaFile:
    """Check a variant completely, and open its delta.

    Args:
        record: Its row.
        objects: The store's files.
        registry: The registry, which has the keys that may sign for its owner.
        base: The base that it must belong to; None: row, manifest and file must name the same base.
        require_signature: Whether to refuse an unsigned variant.
        again: Whether to hash the file even if it has not changed since it was last hashed.

    Raises:
        GymError: With variant, file and remedy: ``SIGNATURE_INVALID``, ``KEY_REVOKED``, ``HASH_MISMATCH``,
            ``FILE_NOT_FOUND``, ``BASE_MISMATCH``, ``DELTA_INVALID``.
    """
    try:
        check_signature(record, registry, required=require_signature)
        return _open(record, objects, base, again)
    except GymError as error:
        path = objects.path(record.sha256)
        where = "" if str(path) in error.message else f" ({path})"
        remedy = _REMEDIES.get(error.code, error.hint)
        if error.code is ErrorCode.DELTA_INVALID:
            remedy = error.hint or remedy  # a missing codec does not mean that this copy is damaged
        raise GymError(error.code, f"variant {record.name!r}{where}: {error.message}", remedy) from error


def check_signature(record: VariantRecord, registry: VariantRegistry, *, required: bool) -> None:
    """Check that a row is what its owner signed.

    The key must be the owner's: the one whose hash is the account's id, or one added with ``VariantStore.trust``, such
    as the newer key of a rotated account, or the key of a plain user id.

    Raises:
        GymError: ``SIGNATURE_INVALID`` or ``KEY_REVOKED``.
    """
    if record.manifest is None:
        if required:
            raise _invalid("has no signature, but this store requires one")
        return
    try:
        signed = SignedVariant.parse(record.manifest)
    except GymError as error:
        raise _invalid(f"its manifest cannot be read: {error.message}") from error
    if signed.to_json() != record.manifest:
        raise _invalid("its manifest is not in canonical form")
    check_manifest(record, signed)
    check_key(signed, record.owner, registry.key_state(record.owner, signed.public_key))


def check_manifest(record: VariantRecord, signed: SignedVariant) -> None:
    """Check that a row agrees with its manifest, and that the manifest's key signed it.

    Raises:
        GymError: ``SIGNATURE_INVALID``.
    """
    signed.verify()
    manifest = signed.manifest
    fields = {
        "name": (record.name, manifest.variant),
        "sha256": (record.sha256, manifest.delta_sha256),
        "size": (record.size_bytes, manifest.size_bytes),
        "base model": (record.base_model, manifest.base_model),
        "base digest": (record.base_digest, manifest.base_digest),
        "revision": (record.revision, manifest.revision),
        "note": (record.note, manifest.note),
    }
    if is_account(record.owner):
        fields["owner"] = (record.owner, manifest.owner)
    for name, (here, there) in fields.items():
        if here != there:
            raise _invalid(f"its {name} is {here!r} in this store, but its owner signed {there!r}")


def check_key(signed: SignedVariant, owner: str, state: str | None) -> None:
    """Check that a key may sign for an owner; ``state`` is the key's state in the store.

    Raises:
        GymError: ``KEY_REVOKED`` or ``SIGNATURE_INVALID``.
    """
    key = signed.public_key
    if state == "revoked":
        raise GymError(
            ErrorCode.KEY_REVOKED, f"is signed by key {key.hex()[:16]} of {owner}, which was revoked"
        )
    if state is None and contributor_id(key) != owner:
        raise _invalid(f"is signed by the key of {contributor_id(key)}, which is not a known key of {owner}")


def _open(record: VariantRecord, objects: DeltaObjects, base: BaseSpec | None, again: bool) -> DeltaFile:
    from gym_fed.delta.file import DeltaFile

    path = objects.path(record.sha256)
    identity = objects.verify(record.sha256, again=again)
    delta = DeltaFile.open(path, base, added_tokens=True)
    try:
        actual = (delta.size_bytes, delta.manifest.base_model, delta.manifest.base_digest)
        if actual != (record.size_bytes, record.base_model, record.base_digest):
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{path} has size, base and digest {actual}, but the store's row has "
                f"{(record.size_bytes, record.base_model, record.base_digest)}",
                _RESTORE_HINT,
            )
        if objects.identity(record.sha256) != identity:
            raise GymError(ErrorCode.HASH_MISMATCH, f"{path} was changed while it was being opened")
    except BaseException:
        delta.close()
        raise
    return delta


def _invalid(message: str) -> GymError:
    return GymError(ErrorCode.SIGNATURE_INVALID, message)
