"""Signed heads: the hub's signature over its whole ledger, and proofs that two heads contradict each other.

A hub signs at most one head for a size, always that of its newest entry, and with a time that never goes back. So two
heads of one hub prove a fork when they have one size and differ, or when the shorter one was signed later; and a head
with an entry proved to be under it proves one against the head that was signed at that entry.
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
"""Key of an entry's body with the number of heads that were signed before it. It reveals a deleted head."""
_SIGNATURE = re.compile(r"[0-9a-f]{128}", re.ASCII)


@dataclass(frozen=True)
class Head:
    """The signed content: the state of the ledger at one size.

    Attributes:
        format: ``gym-head-1``.
        server: Id of the hub, from the key that signs.
        size: How many entries there were; the last one has this sequence number.
        hash: Hash of the last entry, which through the chain covers all before it.
        root: Root of the Merkle tree over the hashes of all entries.
        server_round: The latest round of that time; 0 before the first.
        at: When, in Unix seconds; never before an earlier head's.
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
    """A head and the signature over ``{"ledger_head": head}``."""

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
    def from_dict(cls, found: Any) -> SignedHead:
        """The inverse of ``to_dict``.

        Raises:
            GymError: ``STATE_CORRUPT`` for anything that is not of a head's form.
        """
        head = found.get("head") if isinstance(found, dict) else None
        kinds = {"format": str, "server": str, "hash": str, "root": str}
        whole = {"size": int, "server_round": int, "at": int}
        if (
            not isinstance(head, dict)
            or set(found) != {"head", "signature"}
            or set(head) != {*kinds, *whole}
            or any(type(head[name]) is not kind for name, kind in {**kinds, **whole}.items())
            or not isinstance(found["signature"], str)
            or not _SIGNATURE.fullmatch(found["signature"])
            or head["format"] != FORMAT
            or not (is_hash(head["hash"]) and is_hash(head["root"]))
            or head["size"] < 1
        ):
            raise corrupt(f"{str(found)[:80]} is not a signed head of format {FORMAT}")
        return cls(Head(**head), found["signature"])

    @classmethod
    def from_json(cls, text: str) -> SignedHead:
        """Parse canonical JSON; other spellings are refused.

        Raises:
            GymError: ``STATE_CORRUPT``.
        """
        return cls.from_dict(parsed(text))

    def verify(self, public_key: bytes) -> None:
        """Raise ``STATE_CORRUPT`` unless the hub with this key signed the head."""
        where = f"head {self.size}"
        if self.head.server != server_id(public_key):
            raise corrupt(f"{where} is of {self.head.server}, not of {server_id(public_key)}")
        try:
            signature = bytes.fromhex(self.signature)
            verify_signature(public_key, {"ledger_head": vars(self.head)}, signature)
        except (GymError, ValueError) as error:
            raise corrupt(f"{where} is not signed by the key of {self.head.server}") from error


@dataclass(frozen=True)
class EntryProof:
    """An entry, a signed head, and the Merkle path that proves the entry is included under the head.

    The head of the entry's own size names the entry's hash itself; it needs no path.
    """

    entry: Entry
    head: SignedHead
    path: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {"entry": self.entry.to_dict(), "head": self.head.to_dict(), "path": list(self.path)}

    @classmethod
    def from_dict(cls, found: Any) -> EntryProof:
        """The inverse of ``to_dict``.

        Raises:
            GymError: ``STATE_CORRUPT``.
        """
        if not isinstance(found, dict) or set(found) != {"entry", "head", "path"}:
            raise corrupt(f"{str(found)[:80]} is not a proof of an entry")
        path = found["path"]
        if not isinstance(path, list) or not all(is_hash(node) for node in path):
            raise corrupt("the path of a proof is not a list of hashes")
        return cls(Entry.from_dict(found["entry"]), SignedHead.from_dict(found["head"]), tuple(path))

    def verify(self, public_key: bytes) -> None:
        """Raise ``STATE_CORRUPT`` unless the hub signed a head that includes this entry."""
        self.entry.check_hash()
        self.head.verify(public_key)
        size, sequence = self.head.size, self.entry.sequence
        if size == sequence and not self.path:
            under = self.head.head.hash == self.entry.hash
        else:
            under = verify_inclusion(self.entry.hash, sequence - 1, size, self.path, self.head.head.root)
        if not under:
            raise corrupt(f"entry {sequence} ({self.entry.kind}) is not under the head of size {size}")


def contradiction(one: SignedHead, other: SignedHead, proof: EntryProof | None = None) -> str | None:
    """The contradiction between two verified heads of one hub; None if both can be true.

    Args:
        one: A head.
        other: Another head of the same hub.
        proof: For heads of two sizes: proof of the entry at the smaller size under the larger head.
    """
    old, new = sorted((one, other), key=lambda signed: signed.size)
    if old.size == new.size:
        if (old.head.hash, old.head.root) != (new.head.hash, new.head.root):
            return f"two different heads of size {old.size}"
        return None
    if old.head.at > new.head.at:
        return f"a head of size {old.size} signed after the one of size {new.size}"
    names_another = proof is not None and proof.entry.hash != old.head.hash
    if names_another and proof is not None and (proof.head, proof.entry.sequence) == (new, old.size):
        return f"entry {old.size} is another one under the head of size {new.size} than under its own"
    return None


def fork_document(
    public_key: bytes, heads: tuple[SignedHead, SignedHead], proof: EntryProof | None
) -> dict[str, Any]:
    """The proof of a fork, to be passed to others; ``check_fork`` reads it."""
    return {
        "format": FORK_FORMAT,
        "public_key": public_key.hex(),
        "heads": [head.to_dict() for head in heads],
        "proof": None if proof is None else proof.to_dict(),
    }


def check_fork(found: Any, public_key: bytes) -> str:
    """Verify a proof of a fork that somebody passed on.

    Returns:
        What it proves.

    Raises:
        GymError: ``STATE_CORRUPT`` when it proves nothing.
    """
    keys = {"format", "public_key", "heads", "proof"}
    if not isinstance(found, dict) or set(found) != keys or found["format"] != FORK_FORMAT:
        raise corrupt(f"{str(found)[:80]} is not a proof of format {FORK_FORMAT}")
    if not isinstance(found["heads"], list) or len(found["heads"]) != 2:
        raise corrupt("the proof of a fork needs two heads")
    first, second = (SignedHead.from_dict(head) for head in found["heads"])
    proof = None if found["proof"] is None else EntryProof.from_dict(found["proof"])
    for signed in (first, second, proof):
        if signed is not None:
            signed.verify(public_key)
    reason = contradiction(first, second, proof)
    if reason is None:
        raise corrupt("the two heads do not contradict each other")
    return reason
