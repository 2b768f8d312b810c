"""Signed heads: the hub's signatures over its entire ledger, and proofs that two heads contradict each other.

A hub signs at most one head per size, always for its newest entry, and with times that never decrease. Two heads of the
same hub prove a fork if they have the same size but differ, or if the shorter one was signed later. A head of size *n*
also proves a fork if a larger head includes an entry *n* with a different hash.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gym_fed.core.errors import GymError
from gym_fed.trust.identity.keys import SigningKey, server_id, verify_signature
from gym_fed.trust.ledger.entries import Entry, canonical_text, corrupt, is_hash, parsed
from gym_fed.trust.ledger.merkle import verify_inclusion

FORMAT = "gym-head-1"
FORK_FORMAT = "gym-fork-1"
HEADS_BEFORE = "heads"
"""Key in an entry's body for the number of heads that were signed before it, which reveals deleted heads."""
_SIGNATURE = re.compile(r"[0-9a-f]{128}", re.ASCII)


@dataclass(frozen=True)
class Head:
    """The state of the ledger at one size, as signed by the hub.

    Attributes:
        format: ``gym-head-1``.
        server: Id of the hub, derived from its key.
        size: Number of entries, which is also the sequence number of the last one.
        hash: Hash of the last entry, which covers all earlier ones.
        root: Merkle root of the hashes of all entries.
        server_round: Latest round at the time; 0 before the first.
        at: Time of the signature in Unix seconds; never earlier than that of a previous head.
    """

    format: str
    server: str
    size: int
    hash: str
    root: str
    server_round: int
    at: int


@dataclass(frozen=True)
class SignedHead:
    """A head with the signature over ``{"ledger_head": head}``."""

    head: Head
    signature: str

    @classmethod
    def sign(cls, key: SigningKey, head: Head) -> SignedHead:
        return cls(head, key.sign({"ledger_head": vars(head)}).hex())

    @property
    def size(self) -> int:
        return self.head.size

    def to_dict(self) -> dict[str, Any]:
        return {"head": dict(vars(self.head)), "signature": self.signature}

    def to_json(self) -> str:
        """Serialise as canonical JSON."""
        return canonical_text(self.to_dict())

    @classmethod
    def from_dict(cls, data: Any) -> SignedHead:
        """Create a signed head from the dict that ``to_dict`` returns.

        Raises:
            GymError: ``STATE_CORRUPT`` for invalid data.
        """
        head = data.get("head") if isinstance(data, dict) else None
        kinds = {"format": str, "server": str, "hash": str, "root": str}
        whole = {"size": int, "server_round": int, "at": int}
        if (
            not isinstance(head, dict)
            or set(data) != {"head", "signature"}
            or set(head) != {*kinds, *whole}
            or any(type(head[name]) is not kind for name, kind in {**kinds, **whole}.items())
            or not isinstance(data["signature"], str)
            or not _SIGNATURE.fullmatch(data["signature"])
            or head["format"] != FORMAT
            or not (is_hash(head["hash"]) and is_hash(head["root"]))
            or head["size"] < 1
        ):
            raise corrupt(f"{str(data)[:80]} is not a signed head of format {FORMAT}")
        return cls(Head(**head), data["signature"])

    @classmethod
    def from_json(cls, text: str) -> SignedHead:
        """Parse canonical JSON; text in any other form is rejected.

        Raises:
            GymError: ``STATE_CORRUPT`` for invalid data.
        """
        return cls.from_dict(parsed(text))

    def verify(self, public_key: bytes) -> None:
        """Raise ``STATE_CORRUPT`` unless the hub with this key has signed the head."""
        where = f"head {self.size}"
        if self.head.server != server_id(public_key):
            raise corrupt(f"{where} belongs to {self.head.server}, not to {server_id(public_key)}")
        try:
            signature = bytes.fromhex(self.signature)
            verify_signature(public_key, {"ledger_head": vars(self.head)}, signature)
        except (GymError, ValueError) as error:
            raise corrupt(f"{where} is not signed by the key of {self.head.server}") from error


@dataclass(frozen=True)
class EntryProof:
    """A proof that a signed head includes an entry, through a Merkle path.

    If the size of the head is the entry's sequence number, the head itself contains the entry's hash. No path is then
    needed.
    """

    entry: Entry
    head: SignedHead
    path: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"entry": self.entry.to_dict(), "head": self.head.to_dict(), "path": list(self.path)}

    @classmethod
    def from_dict(cls, data: Any) -> EntryProof:
        """Create a proof from the dict that ``to_dict`` returns.

        Raises:
            GymError: ``STATE_CORRUPT`` for invalid data.
        """
        if not isinstance(data, dict) or set(data) != {"entry", "head", "path"}:
            raise corrupt(f"{str(data)[:80]} is not a proof of an entry")
        path = data["path"]
        if not isinstance(path, list) or not all(is_hash(node) for node in path):
            raise corrupt("the path of a proof is not a list of hashes")
        return cls(Entry.from_dict(data["entry"]), SignedHead.from_dict(data["head"]), tuple(path))

    def verify(self, public_key: bytes) -> None:
        """Raise ``STATE_CORRUPT`` unless the hub with this key has signed a head that includes this entry."""
        self.entry.check_hash()
        self.head.verify(public_key)
        size, sequence = self.head.size, self.entry.sequence
        if size == sequence and not self.path:
            under = self.head.head.hash == self.entry.hash
        else:
            under = verify_inclusion(self.entry.hash, sequence - 1, size, self.path, self.head.head.root)
        if not under:
            raise corrupt(f"entry {sequence} ({self.entry.kind}) is not under the head of size {size}")


def contradiction(first: SignedHead, second: SignedHead, proof: EntryProof | None = None) -> str | None:
    """Describe the contradiction between two verified heads of the same hub; None if they are consistent.

    Args:
        first: A head.
        second: Another head of the same hub.
        proof: For heads of different sizes, a proof that the larger head includes the entry at the smaller size.
    """
    old, new = sorted((first, second), key=lambda signed: signed.size)
    if old.size == new.size:
        if (old.head.hash, old.head.root) != (new.head.hash, new.head.root):
            return f"two different heads of size {old.size}"
        return None
    if old.head.at > new.head.at:
        return f"a head of size {old.size} signed after the one of size {new.size}"
    names_another = proof is not None and proof.entry.hash != old.head.hash
    if names_another and proof is not None and (proof.head, proof.entry.sequence) == (new, old.size):
        return f"entry {old.size} differs between the head of size {new.size} and its own head"
    return None


def fork_document(
    public_key: bytes, heads: tuple[SignedHead, SignedHead], proof: EntryProof | None
) -> dict[str, Any]:
    """Return the proof of a fork as a document for sharing, which ``check_fork`` verifies."""
    return {
        "format": FORK_FORMAT,
        "public_key": public_key.hex(),
        "heads": [head.to_dict() for head in heads],
        "proof": None if proof is None else proof.to_dict(),
    }


def check_fork(document: Any, public_key: bytes) -> str:
    """Verify a fork document from another party.

    Returns:
        A description of the fork.

    Raises:
        GymError: ``STATE_CORRUPT`` if the document does not prove a fork.
    """
    keys = {"format", "public_key", "heads", "proof"}
    if not isinstance(document, dict) or set(document) != keys or document["format"] != FORK_FORMAT:
        raise corrupt(f"{str(document)[:80]} is not a proof of format {FORK_FORMAT}")
    if not isinstance(document["heads"], list) or len(document["heads"]) != 2:
        raise corrupt("the proof of a fork needs two heads")
    first, second = (SignedHead.from_dict(head) for head in document["heads"])
    proof = None if document["proof"] is None else EntryProof.from_dict(document["proof"])
    for signed in (first, second, proof):
        if signed is not None:
            signed.verify(public_key)
    reason = contradiction(first, second, proof)
    if reason is None:
        raise corrupt("the two heads do not contradict each other")
    return reason
