"""The receipt of a removed variant: what was deleted, where and when, signed by who deleted it."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from gym_fed.config.schema.base import StrictModel
from gym_fed.trust.identity.signed import Signed, SignedFile
from gym_fed.trust.identity.variant import Sha256, VariantName

MAX_RECEIPT_BYTES = 4 << 20
NOT_COVERED = (
    "the rows themselves",
    "folders of gym variant create --output, and of gym export",
    "records of gym eval",
    "backups",
    "copies that others have pulled",
)
"""What no removal looks for, since no store knows of it."""


class RemovedRevision(StrictModel):
    """One revision that is gone."""

    model_config = ConfigDict(strict=True)

    revision: int
    sha256: Sha256
    size_bytes: int
    base_model: str
    base_digest: str
    made_at: int
    """Unix seconds."""

    signed_by: str | None
    """Id of the key that had signed it."""

    document: Sha256 | None
    """Digest of what was signed, as a hub's ledger names it."""


class HubRemoval(StrictModel):
    """What became of it at one hub."""

    model_config = ConfigDict(strict=True)

    address: str
    server: str
    status: Literal["removed", "absent", "another's", "not asked"]
    receipt: dict[str, Any] | None = None
    """The hub's own receipt of the removal: the entry of its signed ledger, and the proof of it."""


class VariantRemoval(StrictModel):
    """What was removed."""

    model_config = ConfigDict(strict=True)

    variant: VariantName
    owner: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._@+-]{0,127})?$")]
    """An account's id, or a plain user id; empty where the row was damaged."""

    removed_at: int = Field(default_factory=lambda: int(time.time()), ge=0, lt=2**53)
    """Unix seconds."""

    store: str
    """The folder, on the machine where it was removed."""

    revisions: list[RemovedRevision]
    unlinked: list[Sha256]
    """Files that are deleted."""

    shared: list[Sha256]
    """Files that stay, since another variant of the store has the same bytes."""

    work: list[str]
    """Unfinished work that was deleted, below the store's folder."""

    hubs: list[HubRemoval]
    not_covered: list[str]
    """What was not looked for."""


class _RemovalFile(SignedFile):
    removal: VariantRemoval


class SignedRemoval(Signed[VariantRemoval]):
    """A removal, the key of who removed it, and the signature. Whose key it is, ``is_owners`` says.

    The signer writes the rest, so that a signature by another key proves nothing of the owner's variant.
    """

    WHAT, SIGNED_AS, FIELD = "receipt of a removal", "variant_removal", "removal"
    FILE, MAX_CHARACTERS = _RemovalFile, MAX_RECEIPT_BYTES

    @property
    def removal(self) -> VariantRemoval:
        """What is signed."""
        return self.document

    @property
    def is_owners(self) -> bool:
        """Whether the owner is the account of this key: its id follows from the key, and from no other."""
        return self.signed_by == self.removal.owner

    @property
    def is_variants(self) -> bool:
        """Whether the key is the one that had signed the newest revision, by the receipt's own word alone."""
        return bool(self.removal.revisions) and self.removal.revisions[0].signed_by == self.signed_by
