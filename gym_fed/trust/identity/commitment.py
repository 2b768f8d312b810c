"""A commitment to an update before its upload: the hub's signed statement of when it first saw a digest.

A copy can be made only of bytes that somebody has seen, and the hub sees no byte of an upload before the digest was
declared. So of two updates that are the same work, the one that was committed first is not a copy of the other.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey, verify_signature

FORMAT = "gym-commitment-1"
_MAX_CHARACTERS = 4096


@dataclass(frozen=True)
class UploadCommitment:
    """The statement that the hub signs.

    Attributes:
        server: Id of the hub.
        contributor: Who declared the object.
        sha256: Its digest.
        committed_at: When, in Unix seconds of the hub.
    """

    server: str
    contributor: str
    sha256: str
    committed_at: int

    def signed(self, key: SigningKey) -> str:
        """The statement with a signature by the hub's ledger key, as JSON."""
        return json.dumps(
            {"statement": asdict(self), "signature": key.sign(self._claim()).hex()}, sort_keys=True
        )

    def _claim(self) -> dict[str, Any]:
        return {FORMAT: asdict(self)}

    @classmethod
    def verified(cls, text: str, key: bytes) -> UploadCommitment:
        """Read and verify a signed statement.

        Args:
            text: What ``signed`` gave.
            key: The hub's 32-byte ledger key.

        Raises:
            GymError: ``SIGNATURE_INVALID`` for what the hub did not sign.
        """
        try:
            if len(text) > _MAX_CHARACTERS:
                raise ValueError("too long")
            document = json.loads(text)
            statement = cls(**document["statement"])
            signature = bytes.fromhex(document["signature"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise GymError(
                ErrorCode.SIGNATURE_INVALID, "the hub's commitment to an upload cannot be read"
            ) from error
        verify_signature(key, statement._claim(), signature)
        return statement
