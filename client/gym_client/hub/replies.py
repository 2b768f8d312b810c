"""Validate a hub's replies: JSON objects, verdicts, ledger entries and heads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import NoneType
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.trust.ledger.entries import Entry, parsed
from gym_fed.trust.ledger.heads import EntryProof, SignedHead
from gym_fed.trust.ledger.restored import SignedRestored

NOT_ITS_OWN = "the hub sent data that it did not sign"

MAX_DOCUMENT = 1 << 20
"""Maximum number of characters in a document, the same as the maximum payload of a wire message in bytes."""

_MAX_VERDICTS, _MAX_ENTRIES = 100, 500
"""Maximum number of verdicts in one reply, and of their ledger entries, each of which is requested and stored."""

Kind = type | tuple[type, ...]
_MAX_INT = 2**63
_MEASURED = (int, float, NoneType)
_RECEIPT: Mapping[str, Kind] = {
    "update": str,
    "code": str,
    "reason": str,
    "ledger_sequence": int,
    "ledger_hash": str,
    "proof": dict,
    "manifest": str,
}
_VARIANT_RECEIPT: Mapping[str, Kind] = {
    "variant": str,
    "owner": str,
    "revision": int,
    "document": (str, NoneType),
    "held": bool,
}
_VERDICT: Mapping[str, Kind] = {"entries": list, "manifest": str, "code": str}
_ACCOUNT: Mapping[str, Kind] = {
    "balance": int,
    "available": int,
    "held": int,
    "reserved": int,
    "transfers": list,
    "reputation": _MEASURED,
    "owed": int,
    "is_new": bool,
    "rounds": list,
    "privacy": dict,
}
_PRIVACY: Mapping[str, Kind] = {"epsilon": (int, float), "rounds": int, "target_delta": (int, float)}
_SCORED: Mapping[str, Kind] = {
    "reason": str,
    "method": (str, NoneType),
    "score": _MEASURED,
    "error": _MEASURED,
    "similarity": _MEASURED,
    "reputation": _MEASURED,
}


def parse_object(
    text: str,
    what: str,
    refusal: ErrorCode = ErrorCode.INTERNAL,
    optional: Mapping[str, Kind] | None = None,
    **kinds: Kind,
) -> dict[str, Any]:
    """Parse a JSON object with required keys.

    Args:
        text: Text from the hub.
        what: Noun phrase for error messages, such as "a verdict".
        refusal: Code of the raised error.
        optional: Types of the other keys to keep; all others are dropped. None keeps all other keys unchecked.
        kinds: Types of the required keys; a bool is not accepted as a number.

    Raises:
        GymError: ``refusal`` if the text is not such an object.
    """
    if len(text) > MAX_DOCUMENT:
        raise _refused(what, f"has {counted(len(text), 'character')}", refusal)
    try:
        value = json.loads(
            text, parse_int=_bounded_int, parse_float=_finite_float, parse_constant=_finite_float
        )
    except (ValueError, RecursionError) as error:  # RecursionError: deeply nested lists
        raise _refused(what, "is not JSON with finite numbers of at most 63 bits", refusal) from error
    if not isinstance(value, dict):
        raise _refused(what, "is not a JSON object", refusal)
    return _checked(value, what, refusal, optional, kinds)


def _checked(
    value: Mapping[str, Any],
    what: str,
    refusal: ErrorCode,
    optional: Mapping[str, Kind] | None,
    kinds: Mapping[str, Kind],
) -> dict[str, Any]:
    known = {**kinds, **(optional or {})}
    for key, kind in known.items():
        if (key in kinds or key in value) and not _is(value.get(key), kind):
            raise _refused(what, f"has no valid {key!r}", refusal)
    return {key: one for key, one in value.items() if optional is None or key in known}


def _bounded_int(digits: str) -> int:
    number = int(digits)
    if abs(number) >= _MAX_INT:  # formatting it as a float could overflow
        raise ValueError("an integer of more than 63 bits")
    return number


def _finite_float(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError("a number that is not finite")
    return number


def _is(value: object, kind: Kind) -> bool:
    return kind is bool if isinstance(value, bool) else isinstance(value, kind)


def parse_receipt(text: str) -> dict[str, Any]:
    """Parse the receipt of a submitted reply, without verifying it.

    Only the fields of a receipt are kept, since it is stored next to local fields, such as an accepted restore.

    Raises:
        GymError: ``INTERNAL``; see ``parse_object``.
    """
    return parse_object(text, "a receipt", optional=_RECEIPT, verdict=str)


def parse_variant_receipt(text: str) -> dict[str, Any]:
    """Parse the receipt of a stored or removed variant, without verifying it; see ``parse_receipt``."""
    return parse_object(text, "a receipt", optional=_VARIANT_RECEIPT, proof=dict)


def parse_account(text: str) -> dict[str, Any]:
    """Parse ``AccountReply.rewards_json``: balance, reputation, spent privacy budget, and scored updates (``rounds``).

    Raises:
        GymError: ``INTERNAL``; see ``parse_object``.
    """
    account = parse_object(text or "{}", "an account", optional=_ACCOUNT)
    if account.get("privacy"):  # empty without central privacy
        account["privacy"] = _checked(
            account["privacy"], "an account's privacy budget", ErrorCode.INTERNAL, {}, _PRIVACY
        )
    if "rounds" in account:
        kinds: Mapping[str, Kind] = {"server_round": int, "update": str, "verdict": str, "credit": int}
        rows = [row if isinstance(row, dict) else {} for row in account["rounds"]]
        account["rounds"] = [
            _checked(row, "an account's round", ErrorCode.INTERNAL, _SCORED, kinds) for row in rows
        ]
    return account


def parse_verdicts(texts: Any) -> list[dict[str, Any]]:
    """Parse ``AccountReply.verdicts_json``, the verdicts on this contributor's updates, newest first.

    Raises:
        GymError: ``INTERNAL``; see ``parse_object``.
    """
    if len(texts) > _MAX_VERDICTS:
        raise _refused("an account", f"has {counted(len(texts), 'verdict')}, more than {_MAX_VERDICTS}")
    verdicts = [
        parse_object(
            text,
            "a verdict",
            optional=_VERDICT,
            update=str,
            server_round=int,
            verdict=str,
            reason=str,
            bytes=int,
            credit=int,
        )
        for text in texts
    ]
    for verdict in verdicts:
        entries = verdict.get("entries", [])
        if not isinstance(entries, list) or not all(type(number) is int for number in entries):
            raise _refused("a verdict", "has entries that are not numbers")
    if len({number for verdict in verdicts for number in verdict.get("entries", ())}) > _MAX_ENTRIES:
        raise _refused("verdicts", f"name more than {counted(_MAX_ENTRIES, 'ledger entry')}")
    return verdicts


def _refused(what: str, why: str, code: ErrorCode = ErrorCode.INTERNAL) -> GymError:
    return GymError(
        code,
        f"the hub sent {what} that {why}",
        "the hub is faulty or malicious: report it to the coordinator",
    )


def is_statement(line: str) -> bool:
    """Return True if a line in the file of heads is an accepted restore statement instead of a head."""
    return line.startswith('{"signature":')  # keys of canonical JSON are sorted; a head starts with "head"


def heads_in_force(lines: Iterable[str]) -> dict[int, SignedHead]:
    """Return the heads that are not superseded by a later restore statement, by size."""
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
    """Parse the proof in a ``LedgerProofReply`` without verifying it.

    Raises:
        GymError: ``SIGNATURE_INVALID`` if the reply is not a proof.
    """
    with refused_as_unsigned(NOT_ITS_OWN):
        return EntryProof(read_entry(reply.entry), SignedHead.from_json(reply.head_json), tuple(reply.path))


def read_entry(message: Any) -> Entry:
    """Parse a ``LedgerEntry`` and verify its hash.

    Raises:
        GymError: ``SIGNATURE_INVALID`` if it is malformed or its hash does not match.
    """
    entry = Entry(int(message.sequence), message.kind, message.body_json, message.previous_hash, message.hash)
    with refused_as_unsigned():
        entry.check_hash()
    if not isinstance(parsed(entry.body_json), dict):
        raise GymError(ErrorCode.SIGNATURE_INVALID, f"entry {entry.sequence} is not canonical JSON")
    return entry
