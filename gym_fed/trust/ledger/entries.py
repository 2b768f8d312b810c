"""Hash-chained ledger entries in canonical form.

``hash = sha256(canonical{body, kind, previous_hash, sequence})``. The body is stored as the text that was hashed, so
verifiers hash the stored text. They also check that the text *is* canonical; otherwise one JSON value could have two
valid entries.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_digest, canonical_json
from gym_fed.trust.identity.keys import CONTRIBUTOR_PATTERN

GENESIS_HASH = "0" * 64
"""The previous hash of the first entry."""

SEALED = "sealed"
"""The kind of entry for an admission verdict in a private round: ``{"server_round": N, "seal": HEX}``."""

_CONTRIBUTOR = re.compile(f'"({CONTRIBUTOR_PATTERN})"', re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FIELDS = {"body", "hash", "kind", "previous_hash", "sequence"}
_encode = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False
).encode


def corrupt(message: str) -> GymError:
    """Create the error for a failed check of a ledger."""
    return GymError(
        ErrorCode.STATE_CORRUPT,
        f"ledger: {message}",
        "it is not what its hub signed: restore it from a backup, or fetch it again",
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """A ledger entry.

    Attributes:
        sequence: Number of the entry: 1, 2, ... without gaps.
        kind: Kind of the entry: ``verdict``, ``version``, ``credit``, ...
        body_json: Canonical JSON of the body.
        previous_hash: Hash of the previous entry, or ``GENESIS_HASH``.
        hash: Hash of this entry.
    """

    sequence: int
    kind: str
    body_json: str
    previous_hash: str
    hash: str

    @classmethod
    def following(cls, previous: tuple[int, str] | None, kind: str, body: dict[str, Any]) -> Entry:
        """Create the entry after ``previous``, which is a sequence number and hash, or None for the first entry.

        Raises:
            ValueError: If canonical JSON cannot represent the body.
        """
        sequence, before = (previous[0] + 1, previous[1]) if previous else (1, GENESIS_HASH)
        text = canonical_json(body).decode()
        return cls(sequence, kind, text, before, entry_hash(sequence, kind, text, before))

    @property
    def body(self) -> dict[str, Any]:
        """The parsed body; a new object on every access."""
        body = json.loads(self.body_json)
        if not isinstance(body, dict):
            raise corrupt(f"entry {self.sequence} ({self.kind}): its body is not a JSON object")
        return body

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict that contains the parsed body."""
        return {
            "sequence": self.sequence,
            "kind": self.kind,
            "body": self.body,
            "previous_hash": self.previous_hash,
            "hash": self.hash,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Entry:
        """Create an entry from the dict that ``to_dict`` returns.

        Raises:
            GymError: ``STATE_CORRUPT`` unless ``data`` has exactly the five fields of an entry and a matching hash.
        """
        if not isinstance(data, dict) or set(data) != _FIELDS or not isinstance(data["body"], dict):
            raise corrupt(f"{str(data)[:80]} is not an entry")
        sequence, kind, previous, own = (data[k] for k in ("sequence", "kind", "previous_hash", "hash"))
        if type(sequence) is not int or not all(isinstance(text, str) for text in (kind, previous, own)):
            raise corrupt(f"an entry {str(sequence)[:20]} has a field of the wrong type")
        entry = cls(sequence, kind, canonical_text(data["body"]), previous, own)
        entry.check_hash()
        return entry

    def check_hash(self) -> None:
        """Raise ``STATE_CORRUPT`` unless the hash matches the content."""
        if self.hash != entry_hash(self.sequence, self.kind, self.body_json, self.previous_hash):
            raise corrupt(
                f"entry {self.sequence} ({self.kind}) was altered: its hash does not match its content"
            )


class Chain:
    """Verifies entries in order; ``size`` and ``hash`` describe the entries that were verified so far.

    Args:
        size: Number of entries that were already verified.
        hash: Hash of the last verified entry.
    """

    def __init__(self, size: int = 0, hash: str = GENESIS_HASH) -> None:
        self.size = size
        self.hash = hash

    def add(self, entry: Entry) -> dict[str, Any]:
        """Check the next entry and return its body.

        Raises:
            GymError: ``STATE_CORRUPT``, with the entry, if it is out of sequence, altered or not canonical.
        """
        if entry.sequence != self.size + 1 or entry.previous_hash != self.hash:
            raise corrupt(f"entry {entry.sequence} ({entry.kind}) does not follow entry {self.size}")
        entry.check_hash()
        body = parsed(entry.body_json)
        if not isinstance(body, dict):
            raise corrupt(f"entry {entry.sequence} ({entry.kind}): its body is not canonical JSON")
        self.size, self.hash = entry.sequence, entry.hash
        return body


def entry_hash(sequence: int, kind: str, body_json: str, previous_hash: str) -> str:
    """Compute the hex SHA-256 of an entry's canonical JSON, given the body as text."""
    text = (
        f'{{"body":{body_json},"kind":{encode_basestring(kind)},'
        f'"previous_hash":{encode_basestring(previous_hash)},"sequence":{sequence}}}'
    )
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


def canonical_text(value: Any) -> str:
    """Return the canonical JSON of parsed JSON data.

    Raises:
        ValueError: For NaN and infinities.
    """
    return _encode(value)


def parsed(text: str) -> Any:
    """Parse canonical JSON; return ``NotImplemented`` if the text is not canonical."""
    try:
        value = json.loads(text)
        return value if _encode(value) == text else NotImplemented
    except (ValueError, RecursionError):
        return NotImplemented


def is_hash(text: object) -> bool:
    """Return True if a value is a SHA-256 in lower-case hex."""
    return isinstance(text, str) and _HASH.fullmatch(text) is not None


def subjects(body_json: str) -> set[str]:
    """Return the ids of all contributors that an entry's body refers to."""
    return set(_CONTRIBUTOR.findall(body_json))


def seal(manifest_json: str, verdict: str, code: str, reason: str) -> str:
    """Compute the ledger's commitment to an admission verdict in a private round.

    A verdict with its contributor's id would reveal when and in which order updates were sent. A ``sealed`` entry
    instead contains a digest of the update's manifest and the verdict. The manifest contains 128 secret random bits, so
    the content cannot be guessed. Only a holder of the manifest and the receipt can prove the content.

    Args:
        manifest_json: The signed text of the update's manifest.
        verdict: ``admitted`` or ``refused``.
        code: Error code of the refusal; empty for an admission.
        reason: Full reason of the refusal; empty for an admission.

    Returns:
        The SHA-256 in hex.
    """
    content = {"manifest": manifest_json, "verdict": verdict, "code": code, "reason": reason}
    return canonical_digest({"gym-seal-1": content})
