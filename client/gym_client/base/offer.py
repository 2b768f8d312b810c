"""What a hub offers a contributor who lacks its base: from where, how many bytes, under which licence."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from gym_client.hub.replies import parse_object
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain, readable_bytes
from gym_fed.trust.wire.v1 import hub_pb2 as pb

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_PUBLIC = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"([0-9a-f]{40})?", re.ASCII)


@dataclass(frozen=True)
class BaseOffer:
    """Where the base can be had. Everything in it is the hub's word; only the digest is checked.

    Attributes:
        base_model: The hub's plain name for it.
        base_digest: Of its tensors: what must come out.
        size_bytes: Of the files that the hub serves; 0 where it serves none.
        num_files: How many there are.
        listing_sha256: Of their list, so that no other one is fetched than the one that was accepted.
        licence: As the model card at the hub names it; empty where it does not.
        public_name: On the Hugging Face Hub; empty where it has none.
        commit: Of the files there that the hub has; empty where it does not know.
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
    """Where it comes from, in words, with its bytes and licence; empty: from the hub itself."""
    duration: str = ""
    """How long it takes to fetch, in words; what a yes by name is to does not depend on it."""

    @classmethod
    def of(cls, status: pb.StatusReply) -> BaseOffer | None:
        """The offer in a hub's status, or None.

        Raises:
            GymError: ``POLICY_REFUSED`` for an offer, or a digest, that is not of its form.
        """
        if not status.base_json:
            return None
        require_digest(status.base_digest)
        said = parse_object(status.base_json, "the offer of its base", ErrorCode.POLICY_REFUSED)
        offer = cls(
            plain(status.base_model, 100),
            status.base_digest,
            said.get("bytes", 0),
            said.get("files", 0),
            said.get("listing_sha256", ""),
            said.get("licence", ""),
            said.get("public_name", ""),
            said.get("commit", ""),
        )
        sizes = all(type(n) is int and 0 <= n < 1 << 62 for n in (offer.size_bytes, offer.num_files))
        texts = (offer.listing_sha256, offer.licence, offer.public_name, offer.commit)
        if not sizes or not all(isinstance(text, str) and len(text) <= 200 for text in texts):
            raise _refused("has values of the wrong kind")
        if offer.num_files and not (offer.size_bytes and _SHA256.fullmatch(offer.listing_sha256)):
            raise _refused("has files without bytes or sha256")
        if offer.public_name and not _PUBLIC.fullmatch(offer.public_name):
            raise _refused(
                f"names {plain(offer.public_name, 100)!r}, which is no name on the Hugging Face Hub"
            )
        if not _COMMIT.fullmatch(offer.commit):
            raise _refused("names a commit that is none")
        return offer if offer.num_files or offer.public_name else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def fixed_terms(self) -> dict[str, Any]:
        """What a yes by name is to."""
        terms = self.to_dict()
        del terms["duration"]
        return terms

    def summary(self) -> str:
        """Name, bytes and licence in a few words."""
        size, licence = readable_bytes(self.size_bytes), plain(self.licence, 80) or "not known"
        return f"{self.base_model} ({size}, licence: {licence})"

    def lines(self) -> list[str]:
        """For people."""
        licence = plain(self.licence, 80) or "not known; ask the coordinator"
        lines = [f"The hub trains {self.base_model}, which is not on this machine."]
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
            lines.append("the hub serves it to its contributors alone: you are enrolled before it is fetched")
        return lines

    def _duration(self) -> list[str]:
        return [f"to fetch it: {self.duration}"] if self.duration else []


def require_digest(text: str) -> str:
    """``text``, if it is a base's digest.

    Raises:
        GymError: ``POLICY_REFUSED``.
    """
    if not _DIGEST.fullmatch(text):
        raise _refused(f"has a base_digest {plain(text, 80)!r}, which is none")
    return text


def _refused(why: str) -> GymError:
    return GymError(
        ErrorCode.POLICY_REFUSED,
        f"the hub's offer of its base {why}",
        "its software is broken or hostile: report it to the coordinator",
    )
