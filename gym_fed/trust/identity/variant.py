"""Documents that the owner of a variant signs: its manifest and the receipt of its removal."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from gym_fed.config.schema.base import StrictModel, first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_json
from gym_fed.trust.identity.keys import CONTRIBUTOR_PATTERN, SigningKey, contributor_id, verify_signature

DocumentT = TypeVar("DocumentT", bound=StrictModel)


class SignedFile(StrictModel):
    """The base class for the JSON of signed files; subclasses add the document as a field."""

    model_config = ConfigDict(strict=True)

    public_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


@dataclass(frozen=True)
class Signed(Generic[DocumentT]):
    """A document with its public key and signature. Subclasses define the type of the document.

    The signed data is ``{SIGNED_AS: document}``, so a signature for one document type is invalid for all others.
    """

    WHAT: ClassVar[str]
    """Name of the document type for error messages."""

    SIGNED_AS: ClassVar[str]
    FIELD: ClassVar[str]
    """Name of the document's field in the file."""

    FILE: ClassVar[type[SignedFile]]
    MAX_CHARACTERS: ClassVar[int]

    document: DocumentT
    public_key: bytes
    signature: bytes

    @classmethod
    def sign(cls, document: DocumentT, key: SigningKey) -> Self:
        """Sign a document."""
        return cls(document, key.public_key, key.sign(cls._to_sign(document)))

    def verify(self) -> None:
        """Verify the signature with ``public_key``. The caller must check who owns that key.

        Raises:
            GymError: ``SIGNATURE_INVALID`` if it is invalid.
        """
        verify_signature(self.public_key, self._to_sign(self.document), self.signature)

    @property
    def signed_by(self) -> str:
        """The id derived from the signing key."""
        return contributor_id(self.public_key)

    def to_json(self) -> str:
        """Return the canonical JSON of the file."""
        return canonical_json(
            {
                self.FIELD: self.document.model_dump(mode="json"),
                "public_key": self.public_key.hex(),
                "signature": self.signature.hex(),
            }
        ).decode()

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a file's JSON without verifying the signature.

        Raises:
            GymError: ``TOO_LARGE``, or ``USAGE`` with the first invalid field.
        """
        if len(text) > cls.MAX_CHARACTERS:
            raise GymError(ErrorCode.TOO_LARGE, f"{cls.WHAT}: more than {cls.MAX_CHARACTERS:,} characters")
        try:
            file = cls.FILE.model_validate_json(text)
        except ValidationError as error:
            raise GymError(ErrorCode.USAGE, f"{cls.WHAT}: {first_problem(error)}") from error
        key, signature = bytes.fromhex(file.public_key), bytes.fromhex(file.signature)
        return cls(getattr(file, cls.FIELD), key, signature)

    @classmethod
    def _to_sign(cls, document: DocumentT) -> dict[str, Any]:
        return {cls.SIGNED_AS: document.model_dump(mode="json")}


MAX_MANIFEST_BYTES = 4096

VariantName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""The name of a variant. It follows the colon in an API's model name (``gym-nano:alice``), so it must not contain a
colon or a slash."""

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class VariantManifest(StrictModel):
    """A variant, as described by its owner."""

    model_config = ConfigDict(strict=True)

    variant: VariantName
    owner: Annotated[str, Field(pattern=f"^{CONTRIBUTOR_PATTERN}$")]
    """The id of the owner's account."""

    base_model: str = Field(max_length=256)
    """The name of the base, for display only."""

    base_digest: Digest
    """The digest of the tensors to which the delta is added."""

    delta_sha256: Sha256
    size_bytes: int = Field(ge=1, lt=2**53)
    revision: int = Field(default=1, ge=1, lt=2**53)
    """Revision number. The owner increases it to replace the variant, so that an old revision cannot replace a newer
    one."""

    issued_at: int = Field(default_factory=lambda: int(time.time()), ge=0, lt=2**53)
    """Time of the signature in Unix seconds."""

    note: str = Field(default="", max_length=512)
    """A note on the variant's origin, for display only."""


class _VariantFile(SignedFile):
    manifest: VariantManifest


class SignedVariant(Signed[VariantManifest]):
    """The manifest of a variant, signed by the owner; stored and sent with the delta."""

    WHAT, SIGNED_AS, FIELD = "variant manifest", "variant_manifest", "manifest"
    FILE, MAX_CHARACTERS = _VariantFile, MAX_MANIFEST_BYTES

    @property
    def manifest(self) -> VariantManifest:
        """The signed manifest."""
        return self.document

    @property
    def digest(self) -> str:
        """The hex SHA-256 of the JSON, used in the ledger. It is unpredictable, since it covers the signature."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


MAX_RECEIPT_BYTES = 4 << 20
NOT_COVERED = (
    "the rows themselves",
    "folders of gym variant create --output, and of gym export",
    "records of gym eval",
    "backups",
    "copies that others have pulled",
)
"""Kinds of copies that a removal does not search for, since no variant store knows about them."""
SERVERS_NOT_COVERED = "usage logs and API keys of servers"
"""Also not searched for, unless the serving config is passed to the removal."""


class RemovedRevision(StrictModel):
    """A revision that was removed."""

    model_config = ConfigDict(strict=True)

    revision: int
    sha256: Sha256
    size_bytes: int
    base_model: str
    base_digest: str
    made_at: int
    """Time of the revision in Unix seconds."""

    signed_by: str | None
    """The id of the key that signed the revision."""

    document: Sha256 | None
    """The digest of the signed manifest, as recorded in a hub's ledger."""


class HubRemoval(StrictModel):
    """The outcome of a removal at one hub."""

    model_config = ConfigDict(strict=True)

    address: str
    server: str
    status: Literal["removed", "absent", "another's", "not asked"]
    receipt: dict[str, Any] | None = None
    """The hub's own receipt of the removal: the entry in its signed ledger, and the proof of the entry."""


class VariantRemoval(StrictModel):
    """The receipt of a removed variant: what was deleted, where, and when."""

    model_config = ConfigDict(strict=True)

    variant: VariantName
    owner: Annotated[str, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9._@+-]{0,127})?$")]
    """The id of an account or of a local user; empty if the stored row was damaged."""

    removed_at: int = Field(default_factory=lambda: int(time.time()), ge=0, lt=2**53)
    """Time of the removal in Unix seconds."""

    store: str
    """The path of the store's folder on the machine where the variant was removed."""

    revisions: list[RemovedRevision]
    unlinked: list[Sha256]
    """The deleted files."""

    shared: list[Sha256]
    """Files that were kept, since another variant in the store has the same bytes."""

    work: list[str]
    """Unfinished work that was deleted, as paths in the store's folder."""

    hubs: list[HubRemoval]
    usage_log: str = ""
    """The usage log from which the variant and its callers were removed; empty if none was specified."""

    usage_lines: int = Field(default=0, ge=0)
    """Number of changed lines in the usage log; their token counts remain, since royalties depend on them."""

    keys_removed: list[str] = Field(default_factory=list)
    """Names of the API keys that allowed only this variant, and were removed."""

    keys_changed: list[str] = Field(default_factory=list)
    """Names of the API keys that no longer allow this variant."""

    not_covered: list[str]
    """Copies that were not searched for."""


class _RemovalFile(SignedFile):
    removal: VariantRemoval


class SignedRemoval(Signed[VariantRemoval]):
    """A removal receipt with its signature. ``is_owners`` is True if the owner signed it.

    All other fields are claims by the signer, so a signature with another key proves nothing about the owner's variant.
    """

    WHAT, SIGNED_AS, FIELD = "receipt of a removal", "variant_removal", "removal"
    FILE, MAX_CHARACTERS = _RemovalFile, MAX_RECEIPT_BYTES

    @property
    def removal(self) -> VariantRemoval:
        """The signed receipt."""
        return self.document

    @property
    def is_owners(self) -> bool:
        """True if the owner signed the receipt; the owner's id is derived from the key."""
        return self.signed_by == self.removal.owner

    @property
    def is_variants(self) -> bool:
        """True if, according to the receipt, its key also signed the newest revision."""
        return bool(self.removal.revisions) and self.removal.revisions[0].signed_by == self.signed_by
