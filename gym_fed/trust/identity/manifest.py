"""The signed manifest of an update."""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, ValidationError, model_serializer

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest
from gym_fed.trust.identity.keys import SigningKey, verify_signature

MAX_MANIFEST_BYTES = 64 * 1024
_NUMBERS_END = 2**53
"""Exclusive upper bound of integers, below which JSON is exact in every language and databases can store them."""
_LIFETIME_SECONDS = 24 * 3600

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class UpdateManifest(StrictModel):
    """The signed description of one delta for one round; the ledger refers to it by digest."""

    format: Literal["gym-update-1"] = "gym-update-1"
    contributor: str = Field(max_length=64)
    server: str = Field(max_length=128)
    """Id of the hub that the update is for, so that the update cannot be replayed at another hub."""
    task: str = Field(max_length=128)
    """Id of the message that the update answers."""
    server_round: int = Field(ge=1, lt=_NUMBERS_END)
    base_digest: str = Field(max_length=128)
    """Digest of the global version that the delta is relative to."""
    delta_sha256: Sha256
    delta_bytes: int = Field(ge=1, lt=_NUMBERS_END)
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")
    issued_at_seconds: int = Field(ge=0, lt=_NUMBERS_END)
    expires_at_seconds: int = Field(ge=0, lt=_NUMBERS_END)
    num_examples: int = Field(ge=1, lt=_NUMBERS_END)
    metrics: dict[str, float] = Field(default_factory=dict, max_length=32)
    """Self-reported metrics. They are displayed, but neither trusted nor used in the merge."""

    publish_name: bool = False
    """True if the contributor agrees to be named, by the account's name, in models that include this update."""

    training_root: Sha256 | None = None
    """Merkle root of the training steps (``gym_fed.trust.ledger.audits``), if the task requires audits."""

    @model_serializer(mode="wrap")
    def _without_defaults_of_later_releases(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omit fields of later releases that have their default value, so that the digest does not depend on them."""
        data: dict[str, Any] = handler(self)
        if not self.publish_name:
            data.pop("publish_name")
        if self.training_root is None:
            data.pop("training_root")
        return data

    @property
    def digest(self) -> str:
        """The hex SHA-256 of the canonical bytes, which identifies the update."""
        return canonical_digest(self.model_dump(mode="json"))

    def sign(self, key: SigningKey) -> bytes:
        return key.sign(self.model_dump(mode="json"))

    def verify(self, public_key: bytes, signature: bytes) -> None:
        """Raise ``SIGNATURE_INVALID`` unless ``signature`` is a signature of this manifest by ``public_key``."""
        verify_signature(public_key, self.model_dump(mode="json"), signature)

    @classmethod
    def parse(cls, text: str) -> UpdateManifest:
        """Parse a manifest from JSON.

        Raises:
            GymError: ``UPDATE_REFUSED`` with the first invalid field.
        """
        if len(text) > MAX_MANIFEST_BYTES:
            raise GymError(ErrorCode.TOO_LARGE, f"the manifest is larger than {MAX_MANIFEST_BYTES} bytes")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise GymError(ErrorCode.UPDATE_REFUSED, f"manifest: {first_problem(error)}") from error


def new_nonce() -> str:
    """Return 128 random bits in hex."""
    return secrets.token_hex(16)


def lifetime(now: float) -> tuple[int, int]:
    """Return the issue and expiry times of a manifest that is signed at ``now`` (hub time, Unix seconds)."""
    return int(now), int(now) + _LIFETIME_SECONDS
