"""What is checked before a delta becomes a variant, or takes the place of one."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.errors import ErrorCode, GymError
from gym_fed.identity.variant import SignedVariant
from gym_fed.serving.store.objects import Staged
from gym_fed.serving.store.records import VariantRecord, is_account
from gym_fed.serving.store.registry import Transaction
from gym_fed.serving.store.verification import check_key, check_manifest

if TYPE_CHECKING:
    from gym_fed.delta.base import BaseSpec


def describe(
    staged: Staged,
    source: Path,
    signed: SignedVariant | None,
    base: BaseSpec | None,
    *,
    name: str,
    owner: str,
    note: str,
) -> VariantRecord:
    """The row of a delta that is valid, and is what its manifest says.

    Args:
        staged: The store's own copy.
        source: What it is a copy of, for messages.
        signed: Its manifest; None: unsigned.
        base: What it must belong to; None: any.
        name: What it is to be served as.
        owner: Whose it is.
        note: Of an unsigned variant.

    Raises:
        GymError: ``HASH_MISMATCH``, ``SIGNATURE_INVALID``; as ``DeltaFile.open``.
    """
    from gym_fed.delta.file import DeltaFile

    if signed is not None and signed.manifest.delta_sha256 != staged.sha256:
        raise GymError(
            ErrorCode.HASH_MISMATCH,
            f"{source} hashes to {staged.sha256}, but the manifest of {name!r} names {signed.manifest.delta_sha256}",
            "give the file that was signed",
        )
    try:
        with DeltaFile.open(staged.path, base) as opened:
            found = opened.manifest
    except GymError as error:
        message = error.message.replace(str(staged.path), str(source))
        raise GymError(error.code, message, error.hint) from error
    now = int(time.time())
    record = VariantRecord(
        name=name,
        owner=owner,
        sha256=staged.sha256,
        size_bytes=staged.size_bytes,
        base_model=found.base_model,
        base_digest=found.base_digest,
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
    """Whether the key may sign for the owner; the first one of a plain user id is kept as that user's.

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
    """Whether a row may take the place of another.

    Raises:
        GymError: ``PERMISSION_DENIED``, ``FILE_EXISTS``, ``SIGNATURE_INVALID``, ``REPLAYED`` or ``STALE``.
    """
    name = before.name
    if before.owner != new.owner:
        raise GymError(
            ErrorCode.PERMISSION_DENIED,
            f"variant {name!r} is {before.owner}'s, not {new.owner}'s",
            "take another name, or remove it first",
        )
    if not replaces:
        raise GymError(ErrorCode.FILE_EXISTS, f"variant {name!r} exists", "take another name, or replace it")
    if before.manifest is None or before.manifest == new.manifest:
        return
    if new.manifest is None:
        raise GymError(
            ErrorCode.SIGNATURE_INVALID,
            f"variant {name!r} is signed, and an unsigned one does not take its place",
            "sign it, or remove the old one first",
        )
    if new.revision == before.revision:
        raise GymError(
            ErrorCode.REPLAYED,
            f"variant {name!r} has revision {before.revision} already",
            "sign the new one with a higher revision",
        )
    if new.revision < before.revision:
        raise GymError(
            ErrorCode.STALE,
            f"variant {name!r} is at revision {before.revision}, and revision {new.revision} is older",
            "sign the new one with a higher revision",
        )


def numbered(
    record: VariantRecord, before: VariantRecord | None, signed: SignedVariant | None
) -> VariantRecord:
    """With the age and, where nobody signed one, the revision that follow from what was there."""
    if before is None:
        return record
    revision = record.revision if signed is not None else before.revision + 1
    return replace(record, created_at=before.created_at, revision=revision)
