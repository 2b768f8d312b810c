"""What a signed file holds: a document, the key that signed it, and the signature."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Generic, Self, TypeVar

from pydantic import ConfigDict, Field, ValidationError

from gym_fed.config.schema.base import StrictModel
from gym_fed.config.schema.problems import first_problem
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.canonical import canonical_json
from gym_fed.trust.identity.keys import SigningKey, contributor_id, verify_signature

DocumentT = TypeVar("DocumentT", bound=StrictModel)


class SignedFile(StrictModel):
    """Base of the JSON of a signed file; a subclass adds the document, under its own name."""

    model_config = ConfigDict(strict=True)

    public_key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


@dataclass(frozen=True)
class Signed(Generic[DocumentT]):
    """A document, the key that signed it, and the signature; a subclass says of which kind.

    What is signed is ``{SIGNED_AS: document}``, so that a signature of one kind never passes for another.
    """

    WHAT: ClassVar[str]
    """The kind, in errors."""

    SIGNED_AS: ClassVar[str]
    FIELD: ClassVar[str]
    """The document's key in the file."""

    FILE: ClassVar[type[SignedFile]]
    MAX_CHARACTERS: ClassVar[int]

    document: DocumentT
    public_key: bytes
    signature: bytes

    @classmethod
    def sign(cls, document: DocumentT, key: SigningKey) -> Self:
        """Sign with the caller's key."""
        return cls(document, key.public_key, key.sign(cls._to_sign(document)))

    def verify(self) -> None:
        """Whether ``public_key`` signed this. Whose key that is, is the caller's to know.

        Raises:
            GymError: ``SIGNATURE_INVALID``.
        """
        verify_signature(self.public_key, self._to_sign(self.document), self.signature)

    @property
    def signed_by(self) -> str:
        """Id of the key."""
        return contributor_id(self.public_key)

    def to_json(self) -> str:
        """Canonical JSON, as the file has it."""
        return canonical_json(
            {
                self.FIELD: self.document.model_dump(mode="json"),
                "public_key": self.public_key.hex(),
                "signature": self.signature.hex(),
            }
        ).decode()

    @classmethod
    def parse(cls, text: str) -> Self:
        """From JSON; not verified yet.

        Raises:
            GymError: ``TOO_LARGE``, or ``USAGE`` naming the first field that is off.
        """
        if len(text) > cls.MAX_CHARACTERS:
            raise GymError(ErrorCode.TOO_LARGE, f"{cls.WHAT}: more than {cls.MAX_CHARACTERS:,} characters")
        try:
            found = cls.FILE.model_validate_json(text)
        except ValidationError as error:
            raise GymError(ErrorCode.USAGE, f"{cls.WHAT}: {first_problem(error)}") from error
        key, signature = bytes.fromhex(found.public_key), bytes.fromhex(found.signature)
        return cls(getattr(found, cls.FIELD), key, signature)

    @classmethod
    def _to_sign(cls, document: DocumentT) -> dict[str, Any]:
        return {cls.SIGNED_AS: document.model_dump(mode="json")}
