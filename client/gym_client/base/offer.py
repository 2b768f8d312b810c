"""A hub's offer of its base model: source, size and licence."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from gym_client.hub.replies import parse_object
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain, quoted, readable_bytes
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PUBLIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"([0-9a-f]{40})?", re.ASCII)


@dataclass(frozen=True)
class BaseOffer:
    """A hub's offer of its base model. All values are the hub's claims; only the digest is verified.

    Attributes:
        base_model: The hub's name for the base, with unprintable characters escaped.
        base_digest: Digest of the base's tensors.
        size_bytes: Total size of the files that the hub serves; 0 if it serves none.
        num_files: Number of files.
        listing_sha256: Digest of the list of files, so that only the accepted list is fetched.
        licence: Licence from the hub's model card; empty if unknown.
        public_name: Repository name on the Hugging Face Hub; empty if there is none.
        commit: Commit of the files on the Hugging Face Hub; empty if unknown.
    """

    base_model: str
    base_digest: str
    size_bytes: int
    num_files: int
    listing_sha256: str
    licence: str
    public_name: str
    commit: str
    source: str = ""
    """A description of the source, with size and licence; empty if the hub itself serves the base."""
    duration: str = ""
    """A description of the expected download time; not part of the accepted terms."""
    seeding: tuple[str, ...] = ()
    """A description of what seeding does on this machine; seeding begins with the download of the base."""

    @classmethod
    def of(cls, status: pb.StatusReply) -> BaseOffer | None:
        """Parse the offer in a hub's status; None if it contains none.

        Raises:
            GymError: ``POLICY_REFUSED`` for an invalid offer or digest.
        """
        if not status.base_json:
            return None
        require_digest(status.base_digest)
        document = parse_object(status.base_json, "the offer of its base", ErrorCode.POLICY_REFUSED)
        offer = cls(
            plain(status.base_model, 100),
            status.base_digest,
            document.get("bytes", 0),
            document.get("files", 0),
            document.get("listing_sha256", ""),
            document.get("licence", ""),
            document.get("public_name", ""),
            document.get("commit", ""),
        )
        sizes = all(type(n) is int and 0 <= n < 1 << 62 for n in (offer.size_bytes, offer.num_files))
        texts = (offer.listing_sha256, offer.licence, offer.public_name, offer.commit)
        if not sizes or not all(isinstance(text, str) and len(text) <= 200 for text in texts):
            raise _refused("has values of the wrong type")
        if offer.num_files and not (offer.size_bytes and _SHA256.fullmatch(offer.listing_sha256)):
            raise _refused("has files without a size or sha256")
        if offer.public_name and not _PUBLIC.fullmatch(offer.public_name):
            raise _refused(
                f"has public_name {plain(offer.public_name, 100)!r}, which is not a name on the Hugging Face Hub"
            )
        if not _COMMIT.fullmatch(offer.commit):
            raise _refused("has an invalid commit")
        return offer if offer.num_files or offer.public_name else None

    def to_dict(self) -> dict[str, Any]:
        """Convert to a JSON-compatible dictionary."""
        return asdict(self)

    def fixed_terms(self) -> dict[str, Any]:
        """Return the terms that are identified by the value of ``--accept``."""
        terms = self.to_dict()
        del terms["duration"]
        return terms

    def summary(self) -> str:
        """Describe name, size and licence in one line."""
        size, licence = readable_bytes(self.size_bytes), plain(self.licence, 80) or "not known"
        return f"{quoted(self.base_model)} ({size}, licence: {licence})"

    def lines(self) -> list[str]:
        """Describe the offer, one line each."""
        licence = plain(self.licence, 80) or "not known; ask the coordinator"
        lines = [f"The hub trains {quoted(self.base_model)}, which is not on this machine."]
        if self.source:
            checked = f"It is checked against the hub's {self.base_digest}."
            return [*lines, plain(self.source, 500), *self._duration(), checked]
        lines.append(f"licence: {licence}")
        if self.num_files:
            size = readable_bytes(self.size_bytes)
            lines.append(
                f"from the hub: {size} in {counted(self.num_files, 'file')}, checked against {self.base_digest}"
            )
            lines += self._duration()
            lines.append(
                "the hub serves the base only to its contributors: you are enrolled before the download"
            )
            lines += [f"from now on this machine {line}" for line in self.seeding]
        return lines

    def _duration(self) -> list[str]:
        return [f"download time: {self.duration}"] if self.duration else []


def require_digest(text: str) -> str:
    """Return ``text`` if it has the format of a base digest.

    Raises:
        GymError: ``POLICY_REFUSED`` otherwise.
    """
    if not _DIGEST.fullmatch(text):
        raise _refused(f"has an invalid base_digest {plain(text, 80)!r}")
    return text


def _refused(why: str) -> GymError:
    return GymError(
        ErrorCode.POLICY_REFUSED,
        f"the hub's offer of its base {why}",
        "the hub is faulty or malicious: report it to the coordinator",
    )
