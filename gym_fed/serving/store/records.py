"""What the registry knows of a variant: one row, without its bytes."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from gym_fed.errors import ErrorCode, GymError
from gym_fed.identity.keys import contributor_id
from gym_fed.identity.variant import SignedVariant, VariantName

_NAME: TypeAdapter[str] = TypeAdapter(VariantName)
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@+-]{0,127}", re.ASCII)
_ACCOUNT = re.compile(r"c[0-9a-f]{16}", re.ASCII)


@dataclass(frozen=True)
class VariantRecord:
    """A registered variant.

    Attributes:
        name: What it is served as.
        owner: An account's id (``c`` and 16 hex digits), or a plain user id.
        sha256: Of its `.gymdelta`.
        size_bytes: Of its `.gymdelta`.
        base_model: The base's name, for people.
        base_digest: Of the tensors that the delta is added to.
        revision: Goes up with every replacement.
        created_at: Unix seconds of the first revision here.
        updated_at: Unix seconds of this revision.
        manifest: The signed manifest as canonical JSON; None: unsigned.
        note: For people.
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

    @property
    def is_signed(self) -> bool:
        return self.manifest is not None

    def signed(self) -> SignedVariant | None:
        """The manifest, read but not verified; None where there is none.

        Raises:
            GymError: As ``SignedVariant.parse``.
        """
        return None if self.manifest is None else SignedVariant.parse(self.manifest)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``: every column, and the id of the signing key in place of the manifest's text."""
        found = asdict(self)
        found.pop("manifest")
        signed = self.signed()
        found["signed_by"] = None if signed is None else contributor_id(signed.public_key)
        return found


def is_account(owner: str) -> bool:
    """Whether an owner is an account, whose keys can be checked against its id."""
    return _ACCOUNT.fullmatch(owner) is not None


def validate_name(name: str) -> None:
    """Refuse a name that an API's model name could not carry.

    Raises:
        GymError: ``USAGE``.
    """
    try:
        _NAME.validate_python(name, strict=True)
    except ValidationError as error:
        raise GymError(
            ErrorCode.USAGE,
            f"{name[:80]!r} is no name for a variant",
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
            f"{owner[:80]!r} is no user id",
            "letters, digits and '._@+-', at most 128, beginning with a letter or digit",
        )
