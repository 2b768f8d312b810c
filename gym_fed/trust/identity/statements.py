"""Signed statements by the owner of an account: key rotation, revocation and transfer of credits.

A statement contains its hub, the hub's TLS key, its time and a nonce, so it is valid only once and at one hub. A hub
that imitates another hub's id cannot replay a statement at that hub. The canonical JSON of the statement is signed,
sent and stored in the ledger.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest, canonical_json
from gym_fed.core.text import readable_seconds
from gym_fed.trust.identity.keys import CONTRIBUTOR_PATTERN, SigningKey, verify_signature

MAX_STATEMENT_BYTES = 4096
CLOCK_SKEW_SECONDS = 300

ContributorId = Annotated[str, Field(pattern=f"^{CONTRIBUTOR_PATTERN}$")]
PublicKeyHex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Statement(StrictModel):
    """The base class of all statements."""

    model_config = ConfigDict(populate_by_name=True, strict=True)

    server: str = Field(max_length=128)
    issued_at: int = Field(ge=0, lt=2**53)
    """Time of the statement in Unix seconds."""
    nonce: str = Field(default_factory=lambda: secrets.token_hex(16), pattern=r"^[0-9a-f]{32}$")
    tls: str = Field(pattern=r"^(sha256:[0-9a-f]{64})?$")
    """The hub's TLS key, as ``sha256:<hex>``; see ``gym_fed.trust.identity.login``."""

    def signed(self) -> dict[str, Any]:
        """Return the data that is signed."""
        return self.model_dump(mode="json", by_alias=True)

    def to_json(self) -> str:
        return canonical_json(self.signed()).decode()

    @property
    def digest(self) -> str:
        return canonical_digest(self.signed())

    def sign(self, key: SigningKey) -> bytes:
        return key.sign(self.signed())

    def verify(self, public_key: bytes, signature: bytes) -> None:
        """Raise ``SIGNATURE_INVALID`` unless ``signature`` was made with ``public_key``."""
        verify_signature(public_key, self.signed(), signature)

    def check_fresh(self, server: str, tls: str, now: float) -> None:
        """Check that the statement is recent and is for this hub and its TLS key.

        Raises:
            GymError: ``STALE`` for another hub or key; ``CLOCK_SKEWED`` if the time is too far from ``now``.
        """
        if self.server != server:
            raise GymError(
                ErrorCode.STALE, f"the statement is for hub {self.server[:64]}, but this is {server}"
            )
        if self.tls != tls:
            raise GymError(
                ErrorCode.STALE,
                f"the statement is for a hub with the TLS key {self.tls or 'none'}, but this one has {tls or 'none'}",
                "another hub relayed it; compare the fingerprint in servers/ with the coordinator's",
            )
        require_fresh("the statement", self.issued_at, now)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a statement from JSON.

        Raises:
            GymError: ``USAGE`` with the first invalid field.
        """
        if len(text) > MAX_STATEMENT_BYTES:
            raise GymError(ErrorCode.TOO_LARGE, f"a statement has more than {MAX_STATEMENT_BYTES} characters")
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise GymError(ErrorCode.USAGE, f"statement: {first_problem(error)}") from error


class Rotation(Statement):
    """Replaces the key of account ``rotate`` with ``new_key``. Signed with both keys."""

    rotate: ContributorId
    new_key: PublicKeyHex


class Revocation(Statement):
    """Revokes ``key`` of account ``revoke``, because the key is lost or stolen.

    Signed with that key, or with a key that it has recently replaced.
    """

    revoke: ContributorId
    key: PublicKeyHex
    """The key that signs the statement, in hex."""


class TransferOrder(Statement):
    """Transfers ``amount`` credits from one account to another."""

    transfer: Literal["credits"] = "credits"
    sender: ContributorId = Field(alias="from")
    to: str = Field(max_length=64)
    amount: int


def require_fresh(what: str, issued_at: float, now: float) -> None:
    """Raise ``CLOCK_SKEWED`` unless ``issued_at`` is recent.

    Args:
        what: Name of the signed item for the error message.
        issued_at: Time of the signature in Unix seconds.
        now: The hub's time in Unix seconds.
    """
    ahead = issued_at - now
    if abs(ahead) > CLOCK_SKEW_SECONDS:
        side = "ahead of" if ahead > 0 else "behind"
        raise GymError(
            ErrorCode.CLOCK_SKEWED,
            f"{what} was signed at a time {readable_seconds(abs(ahead))} {side} the hub's",
            "sign with the hub's time from Status; `gym doctor` checks this machine's clock",
        )
