"""Nothing of a variant is used before its bytes, its base, its manifest, and its owner's signature are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gym_fed.errors import ErrorCode, GymError
from gym_fed.identity.keys import contributor_id
from gym_fed.identity.variant import SignedVariant
from gym_fed.serving.store.objects import DeltaObjects
from gym_fed.serving.store.records import VariantRecord, is_account
from gym_fed.serving.store.registry import Registry

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec
    from gym_fed.delta.file import DeltaFile

_AGAIN = (
    "pull it again, make it anew with `gym variant create --replace`, or `gym variant add --replace` a copy"
)
_REMEDIES = {
    ErrorCode.FILE_NOT_FOUND: f"{_AGAIN}, or remove it",
    ErrorCode.HASH_MISMATCH: f"the disk or somebody changed it: {_AGAIN}",
    ErrorCode.BASE_MISMATCH: "serve the base that it was made for, or carry it over with `gym variant rebase`",
    ErrorCode.DELTA_INVALID: "make or pull it again",
    ErrorCode.SIGNATURE_INVALID: "have its owner sign it again: `gym variant add --sign --replace`",
    ErrorCode.KEY_REVOKED: "have its owner sign it again with the new key",
}


def open_verified(
    record: VariantRecord,
    objects: DeltaObjects,
    registry: Registry,
    base: BaseSpec | None,
    *,
    require_signature: bool,
    again: bool = False,
) -> DeltaFile:
    """The delta of a variant, open, after every check.

    Args:
        record: Its row.
        objects: Where its file is.
        registry: Which keys may sign for its owner.
        base: What it must belong to; None: only that row, manifest and file name the same base.
        require_signature: Whether an unsigned variant is refused.
        again: Hash the file even if it has not changed since it was hashed.

    Raises:
        GymError: Naming variant, file and remedy: ``SIGNATURE_INVALID``, ``KEY_REVOKED``, ``HASH_MISMATCH``,
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
            remedy = error.hint or remedy  # a codec that is not installed here comes by no other copy
        raise GymError(error.code, f"variant {record.name!r}{where}: {error.message}", remedy) from error


def check_signature(record: VariantRecord, registry: Registry, *, required: bool) -> None:
    """Whether a row is what its owner signed.

    The key must be the owner's: the one whose hash the account's id is, or one that the store was told of
    (``VariantStore.trust``): a rotated account's newer key, or the key of a plain user id.

    Raises:
        GymError: ``SIGNATURE_INVALID`` or ``KEY_REVOKED``.
    """
    if record.manifest is None:
        if required:
            raise _invalid("has no signature, and this store asks for one")
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
    """Whether the row tells what the manifest does, and its key signed it.

    Raises:
        GymError: ``SIGNATURE_INVALID``.
    """
    signed.verify()
    manifest = signed.manifest
    told = {
        "name": (record.name, manifest.variant),
        "sha256": (record.sha256, manifest.delta_sha256),
        "size": (record.size_bytes, manifest.size_bytes),
        "base model": (record.base_model, manifest.base_model),
        "base digest": (record.base_digest, manifest.base_digest),
        "revision": (record.revision, manifest.revision),
        "note": (record.note, manifest.note),
    }
    if is_account(record.owner):
        told["owner"] = (record.owner, manifest.owner)
    for what, (here, there) in told.items():
        if here != there:
            raise _invalid(f"its {what} is {here!r} here, but its owner signed {there!r}")


def check_key(signed: SignedVariant, owner: str, state: str | None) -> None:
    """Whether a key may sign for an owner; ``state`` is what the store was told of it.

    Raises:
        GymError: ``KEY_REVOKED`` or ``SIGNATURE_INVALID``.
    """
    key = signed.public_key
    if state == "revoked":
        raise GymError(
            ErrorCode.KEY_REVOKED, f"is signed by key {key.hex()[:16]} of {owner}, which was revoked"
        )
    if state is None and contributor_id(key) != owner:
        raise _invalid(f"is signed by the key of {contributor_id(key)}, which is not known to be {owner}'s")


def _open(record: VariantRecord, objects: DeltaObjects, base: BaseSpec | None, again: bool) -> DeltaFile:
    from gym_fed.delta.file import DeltaFile

    path = objects.path(record.sha256)
    identity = objects.verify(record.sha256, again=again)
    delta = DeltaFile.open(path, base)
    try:
        found = (delta.size_bytes, delta.manifest.base_model, delta.manifest.base_digest)
        if found != (record.size_bytes, record.base_model, record.base_digest):
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{path} has size, base and digest {found}, but the store's row says "
                f"{(record.size_bytes, record.base_model, record.base_digest)}",
                _AGAIN,
            )
        if objects.identity(record.sha256) != identity:
            raise GymError(ErrorCode.HASH_MISMATCH, f"{path} was changed while it was being opened")
    except BaseException:
        delta.close()
        raise
    return delta


def _invalid(message: str) -> GymError:
    return GymError(ErrorCode.SIGNATURE_INVALID, message)
