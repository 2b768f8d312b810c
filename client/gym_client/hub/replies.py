"""JSON that a hub sent: read so that nothing in it ends the process, whatever the hub means by it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.ledger.entries import Entry, parsed
from gym_fed.trust.ledger.heads import EntryProof, SignedHead
from gym_fed.trust.ledger.restored import SignedRestored

NOT_ITS_OWN = "the hub answers what it did not sign"

MAX_DOCUMENT = 1 << 20
"""Characters; a message of the wire holds no more."""


def parse_object(
    text: str, what: str, refusal: ErrorCode = ErrorCode.INTERNAL, **kinds: type | tuple[type, ...]
) -> dict[str, Any]:
    """A JSON object with the keys that are needed.

    Args:
        text: As the hub sent it.
        what: Names it in messages: "a verdict".
        refusal: Code of the error.
        kinds: Type of each key that must be there; a bool is no number.

    Raises:
        GymError: ``refusal`` when it is no such object.
    """
    if len(text) > MAX_DOCUMENT:
        raise _refused(what, f"has {len(text)} characters", refusal)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter: lists in lists, thousands deep
        raise _refused(what, "is no JSON", refusal) from error
    if not isinstance(found, dict):
        raise _refused(what, "is no JSON object", refusal)
    for key, kind in kinds.items():
        if not isinstance(found.get(key), kind) or (isinstance(found[key], bool) and kind is not bool):
            raise _refused(what, f"has no {key!r} of the type it should have", refusal)
    return found


def parse_verdicts(texts: Any) -> list[dict[str, Any]]:
    """``AccountReply.verdicts_json``: the hub's verdicts on this contributor's updates, newest first.

    Raises:
        GymError: ``INTERNAL`` as ``parse_object``.
    """
    found = [
        parse_object(
            text, "a verdict", update=str, server_round=int, verdict=str, reason=str, bytes=int, credit=int
        )
        for text in texts
    ]
    for one in found:
        entries = one.get("entries", [])
        if not isinstance(entries, list) or not all(type(number) is int for number in entries):
            raise _refused("a verdict", "has entries that are no numbers")
    return found


def _refused(what: str, why: str, code: ErrorCode = ErrorCode.INTERNAL) -> GymError:
    return GymError(
        code,
        f"{what} that the hub sent {why}",
        "its software is broken or hostile: report it to the coordinator",
    )


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
