"""The rows of the variant registry, and their validation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import CONTRIBUTOR_PATTERN
from gym_fed.trust.identity.variant import SignedVariant, VariantName

_NAME: TypeAdapter[str] = TypeAdapter(VariantName)
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}", re.ASCII)
_ACCOUNT = re.compile(CONTRIBUTOR_PATTERN, re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_TEXTS = ("name", "owner", "sha256", "base_model", "base_digest", "note")
_NUMBERS = {"size_bytes": 1, "revision": 1, "created_at": 0, "updated_at": 0}
"""Integer columns and their minimum values."""
_BEYOND = 2**53


@dataclass(frozen=True)
class VariantRecord:
    """A registered variant.

    Attributes:
        name: The served name.
        owner: An account's id (``c`` and 16 hex digits), or a plain user id.
        sha256: The SHA-256 of its `.gymdelta`.
        size_bytes: The size of its `.gymdelta`.
        base_model: The base's name, for people.
        base_digest: The digest of the tensors that the delta is added to.
        revision: The revision number, which increases with every replacement.
        created_at: Unix seconds of the first revision in this store.
        updated_at: Unix seconds of this revision.
        manifest: The signed manifest as canonical JSON; None if unsigned.
        note: A comment for people.
    """

    name: str
    owner: str
    sha256: str
    size_bytes: int
    base_model: str
    base_digest: str
    revision: int
    created_at: int
    updated_at: int
    manifest: str | None
    note: str

    @classmethod
    def of_row(cls, row: Sequence[Any]) -> VariantRecord:
        """Create a record from the columns of the database, which may contain anything.

        Raises:
            GymError: ``STATE_CORRUPT`` naming variant and column.
        """
        record = cls(*row)
        if fault := _fault(record):
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"the store's row for variant {str(record.name)[:80]!r} is damaged: {fault}",
                "remove it with `gym variant remove`, and add the variant again",
            )
        return record

    @property
    def is_signed(self) -> bool:
        return self.manifest is not None

    def signed(self) -> SignedVariant | None:
        """Parse the manifest without verifying it; None for an unsigned variant.

        Raises:
            GymError: See ``SignedVariant.parse``.
        """
        return None if self.manifest is None else SignedVariant.parse(self.manifest)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for ``--json``, with the id of the signing key instead of the manifest.

        ``signed_by`` is ``unreadable`` for an invalid manifest, which ``VariantStore.verify`` refuses.
        """
        values = asdict(self)
        values.pop("manifest")
        try:
            signed = self.signed()
        except GymError:
            values["signed_by"] = "unreadable"
        else:
            values["signed_by"] = None if signed is None else signed.signed_by
        return values


def _fault(record: VariantRecord) -> str:
    """Return what is invalid in a row, which is then damaged; empty if nothing is invalid."""
    texts = [(column, getattr(record, column)) for column in _TEXTS]
    if record.manifest is not None:
        texts.append(("manifest", record.manifest))
    for column, text in texts:
        if not isinstance(text, str) or not is_encodable(text):
            return f"{column} is not text"
    for column, least in _NUMBERS.items():
        number = getattr(record, column)
        if type(number) is not int or not least <= number < _BEYOND:
            return f"{column} is {number!r:.80}"
    return "" if _SHA256.fullmatch(record.sha256) else f"sha256 is {record.sha256!r:.80}"


def is_encodable(text: str) -> bool:
    """Return True if a text can be encoded in UTF-8, so that it has no lone surrogates."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def is_digest(text: object) -> bool:
    """Return True if a column is the digest of an object, which cannot form another path."""
    return isinstance(text, str) and _SHA256.fullmatch(text) is not None


def is_account(owner: str) -> bool:
    """Return True if an owner is an account, whose keys can be checked against its id."""
    return _ACCOUNT.fullmatch(owner) is not None


def validate_name(name: str) -> None:
    """Refuse a name that cannot be part of a model name of the API.

    Raises:
        GymError: ``USAGE``.
    """
    try:
        _NAME.validate_python(name, strict=True)
    except ValidationError as error:
        raise GymError(
            ErrorCode.USAGE,
            f"{name[:80]!r} is not a valid variant name",
            "letters, digits, '.', '_' and '-', at most 64, beginning with a letter or digit",
        ) from error


def validate_owner(owner: str) -> None:
    """Refuse an owner that is neither an account's id nor a plain user id.

    Raises:
        GymError: ``USAGE``.
    """
    if not _OWNER.fullmatch(owner):
        raise GymError(
            ErrorCode.USAGE,
            f"{owner[:80]!r} is not a valid user id",
            "letters, digits and '._@+-', at most 128, beginning with a letter or digit",
        )
