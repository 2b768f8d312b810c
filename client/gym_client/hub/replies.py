"""Validate a hub's replies: JSON objects, verdicts, ledger entries and heads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.trust.ledger.entries import Entry, parsed
from gym_fed.trust.ledger.heads import EntryProof, SignedHead
from gym_fed.trust.ledger.restored import SignedRestored

NOT_ITS_OWN = "the hub sent something that it did not sign"

MAX_DOCUMENT = 1 << 20
"""Maximum characters; a wire message cannot hold more."""


def parse_object(
    text: str, what: str, refusal: ErrorCode = ErrorCode.INTERNAL, **kinds: type | tuple[type, ...]
) -> dict[str, Any]:
    """Parse a JSON object with required keys.

    Args:
        text: Text from the hub.
        what: Noun phrase for error messages, such as "a verdict".
        refusal: Code of the error.
        kinds: Types of the required keys; a bool does not count as a number.

    Raises:
        GymError: ``refusal`` if it is not such an object.
    """
    if len(text) > MAX_DOCUMENT:
        raise _refused(what, f"has {counted(len(text), 'character')}", refusal)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: thousands of nested lists
        raise _refused(what, "is not JSON", refusal) from error
    if not isinstance(value, dict):
        raise _refused(what, "is not a JSON object", refusal)
    for key, kind in kinds.items():
        if not isinstance(value.get(key), kind) or (isinstance(value[key], bool) and kind is not bool):
            raise _refused(what, f"has no {key!r} of the right type", refusal)
    return value


def parse_verdicts(texts: Any) -> list[dict[str, Any]]:
    """Parse ``AccountReply.verdicts_json``, the verdicts on this contributor's updates, newest first.

    Raises:
        GymError: ``INTERNAL``; see ``parse_object``.
    """
    verdicts = [
        parse_object(
            text, "a verdict", update=str, server_round=int, verdict=str, reason=str, bytes=int, credit=int
        )
        for text in texts
    ]
    for verdict in verdicts:
        entries = verdict.get("entries", [])
        if not isinstance(entries, list) or not all(type(number) is int for number in entries):
            raise _refused("a verdict", "has entries that are not numbers")
    return verdicts


def _refused(what: str, why: str, code: ErrorCode = ErrorCode.INTERNAL) -> GymError:
    return GymError(
        code,
        f"{what} that the hub sent {why}",
        "its software is broken or hostile: report it to the coordinator",
    )


def is_statement(line: str) -> bool:
    """Return True if a line of the heads file is an accepted statement instead of a head."""
    return line.startswith('{"signature":')  # keys of canonical JSON are sorted; a head starts with "head"


def heads_in_force(lines: Iterable[str]) -> dict[int, SignedHead]:
    """Return the heads that no later statement supersedes, by size."""
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
    """Convert any error in the block to ``SIGNATURE_INVALID``: the hub did not sign what it sent."""
    try:
        yield
    except GymError as error:
        raise GymError(ErrorCode.SIGNATURE_INVALID, error.message, hint) from error


def read_proof(reply: Any) -> EntryProof:
    """Parse the proof in a ``LedgerProofReply``, without verifying it.

    Raises:
        GymError: ``SIGNATURE_INVALID`` if it is not a proof.
    """
    with refused_as_unsigned(NOT_ITS_OWN):
        return EntryProof(read_entry(reply.entry), SignedHead.from_json(reply.head_json), tuple(reply.path))


def read_entry(message: Any) -> Entry:
    """Parse a ``LedgerEntry`` and verify its hash.

    Raises:
        GymError: ``SIGNATURE_INVALID``.
    """
    entry = Entry(int(message.sequence), message.kind, message.body_json, message.previous_hash, message.hash)
    with refused_as_unsigned():
        entry.check_hash()
    if not isinstance(parsed(entry.body_json), dict):
        raise GymError(ErrorCode.SIGNATURE_INVALID, f"entry {entry.sequence} is not canonical JSON")
    return entry
