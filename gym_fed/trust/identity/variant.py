"""What the owner of a variant signs: its name, the base it belongs to, and the sha256 of its delta."""

from __future__ import annotations

import hashlib
import time
from typing import Annotated

from pydantic import ConfigDict, Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.trust.identity.keys import CONTRIBUTOR_PATTERN
from gym_fed.trust.identity.signed import Signed, SignedFile

MAX_MANIFEST_BYTES = 4096

VariantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Follows the colon in an API's model name (``gym-nano:alice``), so it has no colon and no slash."""

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class VariantManifest(StrictModel):
    """A variant, as its owner describes it."""

    model_config = ConfigDict(strict=True)

    variant: VariantName
    owner: Annotated[str, Field(pattern=f"^{CONTRIBUTOR_PATTERN}$")]
    """Account of the owner."""

    base_model: str = Field(max_length=256)
    """The base's name, for people."""

    base_digest: Digest
    """Digest of the tensors that the delta is added to."""

    delta_sha256: Sha256
    size_bytes: int = Field(ge=1, lt=2**53)
    revision: int = Field(default=1, ge=1, lt=2**53)
    """Goes up when the owner replaces the variant, so that an old one cannot be put in place of a new one."""

    issued_at: int = Field(default_factory=lambda: int(time.time()), ge=0, lt=2**53)
    """Unix seconds."""

    note: str = Field(default="", max_length=512)
    """For people: what it was made from, or rebased from."""


class _VariantFile(SignedFile):
    manifest: VariantManifest


class SignedVariant(Signed[VariantManifest]):
    """A manifest, its owner's key, and the signature, as they are kept beside a delta and travel."""

    WHAT, SIGNED_AS, FIELD = "variant manifest", "variant_manifest", "manifest"
    FILE, MAX_CHARACTERS = _VariantFile, MAX_MANIFEST_BYTES

    @property
    def manifest(self) -> VariantManifest:
        """What is signed."""
        return self.document

    @property
    def digest(self) -> str:
        """Hex sha256 of the JSON, by which a hub's ledger names it; it cannot be guessed, for the signature in it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()
