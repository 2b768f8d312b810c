"""Which key is an account's, from the ledger alone: what a contributor checks another one by.

The hub's word is not taken where the owner's is there: the first key must hash to the account's id, and a rotation must
be signed by the key that it replaces. Only a rebinding, after a revocation, rests on the coordinator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gym_fed.errors import ErrorCode, GymError
from gym_fed.identity.keys import contributor_id
from gym_fed.identity.statements import Rotation


def key_at(entries: Iterable[Mapping[str, Any]], contributor: str, at: float | None = None) -> bytes:
    """The key of an account at a time.

    Args:
        entries: The ledger's entries in order, each with ``kind`` and ``body``; other kinds are passed over.
        contributor: Id of the account.
        at: Unix seconds; None: at the end of the entries.

    Returns:
        The public key, 32 bytes.

    Raises:
        GymError: ``NOT_FOUND`` for an account that had not enrolled; ``KEY_REVOKED`` when its key was revoked then;
            ``STATE_CORRUPT`` for an entry that no owner signed.
    """
    key: bytes | None = None
    revoked = False
    for entry in entries:
        kind, body = entry["kind"], entry["body"]
        if body.get("contributor") != contributor or (at is not None and body["at"] > at):
            continue
        if kind == "enrolled":
            found = bytes.fromhex(body["public_key"])
            if key is None and contributor_id(found) != contributor:
                raise _corrupt(contributor, "its first key does not hash to its id")
            if key is not None and found != key:
                raise _corrupt(contributor, "it came back with another key than it had")
            key = found
        elif kind == "rotated":
            key = _rotated(contributor, key, body)
        elif kind == "revoked":
            revoked = True
        elif kind == "rebound":
            key, revoked = bytes.fromhex(body["public_key"]), False
    if key is None:
        raise GymError(ErrorCode.NOT_FOUND, f"the ledger knows no contributor {contributor!r} then")
    if revoked:
        raise GymError(ErrorCode.KEY_REVOKED, f"the key of {contributor} was revoked")
    return key


def _rotated(contributor: str, key: bytes | None, body: Mapping[str, Any]) -> bytes:
    new = bytes.fromhex(body["public_key"])
    try:
        statement = Rotation.model_validate(body["statement"])
        if key is None or (statement.rotate, statement.new_key) != (contributor, new.hex()):
            raise _corrupt(contributor, "a rotation that its statement does not tell")
        statement.verify(key, bytes.fromhex(body["signature"]))
        statement.verify(new, bytes.fromhex(body["new_signature"]))
    except (ValueError, GymError) as error:
        raise _corrupt(contributor, f"a rotation that is not signed by both keys ({error})") from error
    return new


def _corrupt(contributor: str, what: str) -> GymError:
    return GymError(
        ErrorCode.STATE_CORRUPT,
        f"ledger: {contributor}: {what}",
        "do not trust this hub; ask its coordinator",
    )
