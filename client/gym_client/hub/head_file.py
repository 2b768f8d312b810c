"""Lines of the file of heads, and the hub's answers about them, as what they carry; nothing is verified here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.ledger.entries import Entry, parsed
from gym_fed.trust.ledger.heads import EntryProof, SignedHead
from gym_fed.trust.ledger.restored import SignedRestored

NOT_ITS_OWN = "the hub answers what it did not sign"


def is_statement(line: str) -> bool:
    """Whether a line of the file is a statement that was accepted, and no head."""
    return line.startswith(
        '{"signature":'
    )  # the keys of canonical JSON are in order; a head's first is "head"


def heads_in_force(lines: Iterable[str]) -> dict[int, SignedHead]:
    """The heads of a file that still stand, by size: those that no later line, a statement, supersedes."""
    known: dict[int, SignedHead] = {}
    for line in lines:
        if is_statement(line):
            signed = SignedRestored.from_json(line)
            known = {size: head for size, head in known.items() if not signed.covers(head)}
        elif line:
            head = SignedHead.from_json(line)
            known[head.size] = head
    return known


@contextmanager
def refused_as_unsigned(hint: str = "") -> Iterator[None]:
    """Whatever is found wrong inside is what the hub did not sign: ``SIGNATURE_INVALID``, whatever it was called."""
    try:
        yield
    except GymError as error:
        raise GymError(ErrorCode.SIGNATURE_INVALID, error.message, hint) from error


def read_proof(reply: Any) -> EntryProof:
    """A ``LedgerProofReply`` as the proof that it carries, not yet verified.

    Raises:
        GymError: ``SIGNATURE_INVALID`` when it is none.
    """
    with refused_as_unsigned(NOT_ITS_OWN):
        return EntryProof(read_entry(reply.entry), SignedHead.from_json(reply.head_json), tuple(reply.path))


def read_entry(message: Any) -> Entry:
    """A ``LedgerEntry`` as an entry whose hash is its content's.

    Raises:
        GymError: ``SIGNATURE_INVALID``.
    """
    entry = Entry(int(message.sequence), message.kind, message.body_json, message.previous_hash, message.hash)
    with refused_as_unsigned():
        entry.check_hash()
    if not isinstance(parsed(entry.body_json), dict):
        raise GymError(ErrorCode.SIGNATURE_INVALID, f"entry {entry.sequence} is not canonical JSON")
    return entry
