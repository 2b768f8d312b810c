"""What the owner of a variant signs: its name, the base it belongs to, and the sha256 of its delta."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import ConfigDict, Field, ValidationError

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.problems import first_problem
from gym_fed.errors import ErrorCode, GymError
from gym_fed.identity.canonical import canonical_json
from gym_fed.identity.keys import CONTRIBUTOR_PATTERN, SigningKey, verify_signature

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


@dataclass(frozen=True)
class SignedVariant:
    """A manifest, the key that signed it, and the signature."""

    manifest: VariantManifest
    public_key: bytes
    signature: bytes

    @classmethod
    def sign(cls, manifest: VariantManifest, key: SigningKey) -> SignedVariant:
        """Sign as the owner that the manifest names."""
        return cls(manifest, key.public_key, key.sign(_signed(manifest)))

    def verify(self) -> None:
        """Whether ``public_key`` signed this manifest. That the key is the owner's is the caller's to know.

        Raises:
            GymError: ``SIGNATURE_INVALID``.
        """
        verify_signature(self.public_key, _signed(self.manifest), self.signature)

    def to_json(self) -> str:
        """Canonical JSON, as it is kept beside a delta and travels."""
        return canonical_json(
            {
                "manifest": self.manifest.model_dump(mode="json"),
                "public_key": self.public_key.hex(),
                "signature": self.signature.hex(),
            }
        ).decode()

    @property
    def digest(self) -> str:
        """Hex sha256 of that JSON, by which a hub's ledger names it; it cannot be guessed, for the signature in it."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @classmethod
    def parse(cls, text: str) -> Self:
        """From JSON; not verified yet.

        Raises:
            GymError: ``TOO_LARGE``, or ``USAGE`` naming the first field that is off.
        """
        if len(text) > MAX_MANIFEST_BYTES:
            raise GymError(
                ErrorCode.TOO_LARGE, f"a variant's manifest of more than {MAX_MANIFEST_BYTES} characters"
            )
        try:
            found = _VariantDocument.model_validate_json(text)
        except ValidationError as error:
            raise GymError(ErrorCode.USAGE, f"variant manifest: {first_problem(error)}") from error
        return cls(found.manifest, bytes.fromhex(found.public_key), bytes.fromhex(found.signature))


class _VariantDocument(StrictModel):
    model_config = ConfigDict(strict=True)

    manifest: VariantManifest
    public_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def _signed(manifest: VariantManifest) -> dict[str, Any]:
    return {"variant_manifest": manifest.model_dump(mode="json")}
