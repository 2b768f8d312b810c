"""Upload commitments: the hub's signed statement of when it first saw the digest of an update.

Copying an update requires access to its bytes, and the hub receives no byte of an upload before its digest is declared.
Of two identical updates, the one that was committed first is therefore not the copy.
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
    """A commitment, as signed by the hub.

    Attributes:
        server: Id of the hub.
        contributor: Id of the contributor who declared the object.
        sha256: Digest of the object.
        committed_at: Time of the commitment by the hub's clock, in Unix seconds.
    """

    server: str
    contributor: str
    sha256: str
    committed_at: int

    def signed(self, key: SigningKey) -> str:
        """Sign the commitment with the hub's ledger key, and return it as JSON."""
        return json.dumps(
            {"statement": asdict(self), "signature": key.sign(self._claim()).hex()}, sort_keys=True
        )

    def _claim(self) -> dict[str, Any]:
        return {FORMAT: asdict(self)}

    @classmethod
    def verified(cls, text: str, key: bytes) -> UploadCommitment:
        """Parse and verify a signed commitment.

        Args:
            text: JSON, as returned by ``signed``.
            key: The hub's 32-byte ledger key.

        Raises:
            GymError: ``SIGNATURE_INVALID`` if the hub did not sign it.
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
