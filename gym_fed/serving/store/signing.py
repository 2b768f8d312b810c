"""Sign variants: a `.gymdelta` before it is added to a store, or an earlier revision to restore it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.serving.store.records import VariantRecord, validate_name
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.variant import SignedVariant, VariantManifest

if TYPE_CHECKING:
    from gym_fed.serving.store.store import VariantStore

MAX_NOTE = 512


def sign_variant(
    delta: Path, key: SigningKey, *, name: str, revision: int = 1, note: str = ""
) -> SignedVariant:
    """Check a delta, and sign its manifest for the key's account.

    Args:
        delta: The file.
        key: The signing key, whose account becomes the owner; see ``SigningKey.of_account`` for rotated keys.
        name: The name to serve the variant as.
        revision: The revision number, which must be higher than that of the replaced variant.
        note: A comment for people; at most ``MAX_NOTE`` characters.

    Raises:
        GymError: Errors from ``DeltaFile.open``; ``USAGE`` for a name or note that is not valid in a manifest.
    """
    from gym_fed.delta.file import DeltaFile

    validate_name(name)
    if len(note) > MAX_NOTE:
        raise GymError(
            ErrorCode.USAGE, f"the note has {counted(len(note), 'character')}", f"use at most {MAX_NOTE}"
        )
    with DeltaFile.open(delta, added_tokens=True) as opened:
        manifest = VariantManifest(
            variant=name,
            owner=key.contributor,
            base_model=opened.manifest.base_model,
            base_digest=opened.manifest.base_digest,
            delta_sha256=opened.sha256(),
            size_bytes=opened.size_bytes,
            revision=revision,
            note=note,
        )
    return SignedVariant.sign(manifest, key)


_RESTORED = re.compile(r"revision \d+ again(: )?", re.ASCII)


def undo(
    store: VariantStore, name: str, key: SigningKey | None, *, to: int | None = None
) -> tuple[VariantRecord, int]:
    """Add the delta of an earlier revision again, as the newest revision with a new number and signature.

    Args:
        store: The store.
        name: The name of the variant.
        key: The owner's key; None leaves the new revision unsigned.
        to: The number of the revision; None: the one before the newest.

    Returns:
        The new row, and the number of the earlier revision.

    Raises:
        GymError: ``NOT_FOUND`` for a revision that is not kept; errors from ``VariantHistory.verify`` and
            ``VariantStore.add``.
    """
    revisions = store.history.of(name)
    newest = next(revision for revision in revisions if revision.is_newest).record
    earlier = [revision for revision in revisions if not revision.is_newest]
    target = next((revision for revision in earlier if to is None or revision.record.revision == to), None)
    if target is None:
        there = ", ".join(str(revision.record.revision) for revision in earlier) or "none"
        missing = "earlier revision" if to is None else f"earlier revision {to}"
        raise GymError(
            ErrorCode.NOT_FOUND,
            f"variant {name!r}, now at revision {newest.revision}, has no {missing} in this store",
            f"earlier revisions in the store: {there}",
        )
    store.history.verify(target)
    old, path = target.record, store.history.path(target)
    before = _RESTORED.sub("", old.note, count=1)
    note = f"revision {old.revision} again{': ' if before else ''}{before}"[:MAX_NOTE]
    number = max(revision.record.revision for revision in revisions) + 1
    signed = None if key is None else sign_variant(path, key, name=name, revision=number, note=note)
    if signed is not None and signed.manifest.delta_sha256 != old.sha256:
        raise GymError(ErrorCode.HASH_MISMATCH, f"{path} was changed while it was being signed")
    record = store.add(
        path,
        signed,
        name=name,
        owner=newest.owner,
        replace=True,
        note="" if signed else note,
        figures=target.figures,
    )
    return record, old.revision
