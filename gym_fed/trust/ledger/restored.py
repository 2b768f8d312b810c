"""A hub's signed statement that it was restored from a backup: where the ledger resumes, and what is lost.

A hub that resumes from an older state signs different entries than before, which is a fork. The statement is in the
ledger as an entry of kind ``restored``, and is sent to everyone who has a head of the lost part. Without a statement
and the contributor's consent, the restore is treated as a fork.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey, server_id, verify_signature
from gym_fed.trust.ledger.entries import GENESIS_HASH, canonical_text, corrupt, is_hash, parsed
from gym_fed.trust.ledger.heads import SignedHead

FORMAT = "gym-restored-1"
KIND = "restored"
"""The kind of entry that contains a statement (``statement``) and its signature (``signature``)."""

MAX_REASON = 200
_KINDS = {"format": str, "server": str, "restored_at_entry": int, "hash": str, "at": int, "reason": str}


@dataclass(frozen=True)
class Restored:
    """The statement, as signed by the hub.

    Attributes:
        format: ``gym-restored-1``.
        server: Id of the hub.
        restored_at_entry: Sequence number of the last entry that is still valid; 0 if there is none.
        hash: Hash of that entry.
        at: Time of the statement in Unix seconds; not earlier than that of any lost head.
        reason: The coordinator's explanation.
        lost: The highest lost head, as a document; None if the coordinator knows of none.
    """

    format: str
    server: str
    restored_at_entry: int
    hash: str
    at: int
    reason: str
    lost: dict[str, Any] | None

    @property
    def lost_head(self) -> SignedHead | None:
        """The parsed ``lost`` head; None if there is none."""
        return None if self.lost is None else SignedHead.from_dict(self.lost)


@dataclass(frozen=True)
class SignedRestored:
    """A statement with the hub's signature, by its ledger key, over ``{"hub_restored": statement}``."""

    statement: Restored
    signature: str

    @classmethod
    def sign(cls, key: SigningKey, statement: Restored) -> SignedRestored:
        return cls(statement, key.sign({"hub_restored": vars(statement)}).hex())

    def to_dict(self) -> dict[str, Any]:
        return {"statement": dict(vars(self.statement)), "signature": self.signature}

    def to_json(self) -> str:
        """Serialise as canonical JSON."""
        return canonical_text(self.to_dict())

    @classmethod
    def from_dict(cls, data: Any) -> SignedRestored:
        """Create a signed statement from the dict that ``to_dict`` returns; extra keys are ignored.

        Raises:
            GymError: ``STATE_CORRUPT`` for invalid data.
        """
        statement = data.get("statement") if isinstance(data, dict) else None
        if (
            not isinstance(statement, dict)
            or set(statement) != {*_KINDS, "lost"}
            or any(type(statement[name]) is not kind for name, kind in _KINDS.items())
            or statement["format"] != FORMAT
            or statement["restored_at_entry"] < 0
            or not is_hash(statement["hash"])
            or (statement["restored_at_entry"] == 0 and statement["hash"] != GENESIS_HASH)
            or len(statement["reason"]) > MAX_REASON
            or not isinstance(data.get("signature"), str)
        ):
            raise corrupt(f"{str(data)[:80]} is not a statement of format {FORMAT}")
        if statement["lost"] is not None:
            SignedHead.from_dict(statement["lost"])
        return cls(Restored(**statement), data["signature"])

    @classmethod
    def from_json(cls, text: str) -> SignedRestored:
        """Parse canonical JSON; text in any other form is rejected. Raises the errors of ``from_dict``."""
        return cls.from_dict(parsed(text))

    def verify(self, public_key: bytes) -> None:
        """Raise ``STATE_CORRUPT`` unless the hub with this key has signed the statement and its lost head."""
        statement = self.statement
        if statement.server != server_id(public_key):
            raise corrupt(
                f"the statement of a restore is from {statement.server[:24]}, not from {server_id(public_key)}"
            )
        try:
            verify_signature(public_key, {"hub_restored": vars(statement)}, bytes.fromhex(self.signature))
        except (GymError, ValueError) as error:
            raise corrupt(
                f"the statement of a restore is not signed by the key of {statement.server}"
            ) from error
        if statement.lost_head is not None:
            statement.lost_head.verify(public_key)

    def covers(self, head: SignedHead) -> bool:
        """Return True if the head was lost: it is after the last valid entry, and was signed before the statement."""
        return head.size > self.statement.restored_at_entry and head.head.at <= self.statement.at


class HubRestored(GymError):
    """Raised for a hub that was restored to an older state than the contributor has seen.

    Args:
        signed: The statement, with a verified signature.
        message: Message of the ``GymError``.
        hint: Hint of the ``GymError``.
    """

    def __init__(self, signed: SignedRestored, message: str, hint: str) -> None:
        super().__init__(ErrorCode.HUB_RESTORED, message, hint)
        self.signed = signed

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.signed, self.message, self.hint)
