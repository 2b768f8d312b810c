"""Signing of a `.gymdelta` as a variant, before it is added to a store."""

from __future__ import annotations

from pathlib import Path

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.serving.store.records import validate_name
from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.variant import SignedVariant, VariantManifest

MAX_NOTE = 512


def sign_variant(
    delta: Path, key: SigningKey, *, name: str, revision: int = 1, note: str = ""
) -> SignedVariant:
    """Check a delta, and sign its manifest in the name of the key's account.

    Args:
        delta: The file.
        key: The signing key, whose account becomes the owner; ``SigningKey.of_account`` for an account with a rotated
        key.
        name: The name to serve the variant as.
        revision: Must be higher than that of the variant it replaces.
        note: A comment for people; at most ``MAX_NOTE`` characters.

    Raises:
        GymError: As ``DeltaFile.open``; ``USAGE`` for a name or note that a manifest cannot carry.
    """
    from gym_fed.delta.file import DeltaFile

    validate_name(name)
    if len(note) > MAX_NOTE:
        raise GymError(ErrorCode.USAGE, f"a note of {len(note)} characters", f"at most {MAX_NOTE}")
    with DeltaFile.open(delta) as opened:
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
