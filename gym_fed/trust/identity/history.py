"""Replay a ledger to determine the keys of accounts and the transfers of credits, and to verify the hub's claims.

Owners' signatures are verified wherever they exist. The first key must hash to the account's id. A rotation must be
signed with both keys, and a transfer with the account's key at that time; a transfer must not settle within the hold
period. Only a revocation by the coordinator, and the rebinding that follows it, require trust in the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import contributor_id
from gym_fed.trust.identity.statements import (
    CLOCK_SKEW_SECONDS,
    Revocation,
    Rotation,
    Statement,
    TransferOrder,
)

ACTIVE, ROTATED, REVOKED = "active", "rotated", "revoked"
PENDING = "pending"
_SLACK_SECONDS = 2
"""Tolerance in seconds, since ledger entries contain times in whole seconds."""
_ANSWER_SECONDS = 60
"""Tolerance in seconds, in addition to the clock skew, for the delay between a statement and its entry."""
_ONCE = {"credit": "server_round", "royalty": "usage", "version": "height"}
"""Kinds of entries that occur at most once per subject, with the key that identifies the subject."""
_KEY_KINDS = ("enrolled", "rotated", "revoked", "rebound")


@dataclass
class Key:
    """A key of an account, with the times of its ledger entries in Unix seconds."""

    contributor: str
    status: str
    since: int
    until: int | None = None


@dataclass
class Move:
    """A transfer of credits."""

    sender: str
    recipient: str
    amount: int
    hold_seconds: float
    nonce: str
    status: str
    asked_at: int
    closed_at: int | None = None


class History:
    """Tracks keys and transfers through all entries of a ledger, in order.

    Args:
        server: Id of the hub that statements must be for; None to skip this check.

    Attributes:
        keys: The keys, by public key in hex.
        names: Names of accounts at their first enrolment, by id.
        moves: Transfers by id.
    """

    def __init__(self, server: str | None = None) -> None:
        self.keys: dict[str, Key] = {}
        self.names: dict[str, str] = {}
        self.moves: dict[str, Move] = {}
        self._server = server
        self._current: dict[str, str] = {}
        self._nonces: set[tuple[str, str]] = set()
        self._once: set[tuple[Any, ...]] = set()
        self._kinds: dict[str, Callable[[str, Mapping[str, Any]], None]] = {
            "enrolled": self._enrolled,
            "rotated": self._rotated,
            "revoked": self._revoked,
            "rebound": self._rebound,
            "transfer": self._transfer,
            "transfer-settled": self._closed,
            "transfer-cancelled": self._closed,
            **dict.fromkeys(_ONCE, self._recorded_once),
        }

    def add(self, kind: str, body: Mapping[str, Any]) -> None:
        """Process the next entry; unrelated kinds are skipped.

        Raises:
            GymError: ``STATE_CORRUPT`` for an entry that no owner signed, or that cannot follow the earlier entries.
        """
        follow = self._kinds.get(kind)
        if follow is None:
            return
        try:
            follow(kind, body)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            who = str(body.get("contributor") or body.get("from") or kind)[:24]
            raise _corrupt(who, f"a malformed entry of kind {kind} ({type(error).__name__})") from error

    def current(self, contributor: str) -> bytes | None:
        """Return the newest key of an account, valid or revoked; None if there is none."""
        key = self._current.get(contributor)
        return None if key is None else bytes.fromhex(key)

    def is_revoked(self, contributor: str) -> bool:
        """Return True if the newest key of an account was revoked."""
        return self.keys[self._current[contributor]].status == REVOKED

    # ---- keys ----

    def _enrolled(self, kind: str, body: Mapping[str, Any]) -> None:
        who, key = body["contributor"], body["public_key"]
        before = self._current.get(who)
        if before is None and contributor_id(bytes.fromhex(key)) != who:
            raise _corrupt(who, "its first key does not hash to its id")
        if before is not None and key != before:
            raise _corrupt(who, "it returned with a different key from before")
        if before is not None and self.is_revoked(who):
            raise _corrupt(who, "it returned with a revoked key")
        if before is None:
            self._give(who, key, body["at"])
            self.names[who] = str(body.get("name", ""))

    def _rotated(self, kind: str, body: Mapping[str, Any]) -> None:
        who, new, old = body["contributor"], body["public_key"], self._good(body["contributor"], "a rotation")
        try:
            statement = Rotation.model_validate(body["statement"])
            if (statement.rotate, statement.new_key) != (who, new):
                raise _corrupt(who, "a rotation that its statement does not contain")
            statement.verify(bytes.fromhex(old), bytes.fromhex(body["signature"]))
            statement.verify(bytes.fromhex(new), bytes.fromhex(body["new_signature"]))
        except (ValueError, GymError) as error:
            raise _corrupt(who, f"a rotation that is not signed by both keys ({error})") from error
        self._check_said(who, statement, body["at"])
        self._end(old, ROTATED, body["at"])
        self._give(who, new, body["at"])

    def _revoked(self, kind: str, body: Mapping[str, Any]) -> None:
        who, old = body["contributor"], self._good(body["contributor"], "a revocation")
        if body["public_key"] != old:
            raise _corrupt(who, "a revocation of a key other than its own")
        if body["by"] != "coordinator":
            try:
                self._check_owner(who, body)
            except (ValueError, GymError) as error:
                raise _corrupt(who, f"a revocation that none of its keys signed ({error})") from error
        for key in body.get("also_revoked", ()):
            if self.keys[key].contributor != who or self.keys[key].status != ROTATED:
                raise _corrupt(who, "a revocation of a key that it never had")
            self.keys[key].status = REVOKED
        self._end(old, REVOKED, body["at"])

    def _check_owner(self, who: str, body: Mapping[str, Any]) -> None:
        statement = Revocation.model_validate(body["statement"])
        signer = self.keys.get(statement.key)
        if statement.revoke != who or signer is None or signer.contributor != who:
            raise _corrupt(who, "its statement is about something else")
        hold = float(body.get("hold_seconds", float("inf")))
        if signer.status == REVOKED or (
            signer.until is not None and signer.until < body["at"] - hold - _SLACK_SECONDS
        ):
            raise _corrupt(who, "the key was revoked, or replaced too long ago")
        statement.verify(bytes.fromhex(statement.key), bytes.fromhex(body["signature"]))
        self._check_said(who, statement, body["at"])

    def _rebound(self, kind: str, body: Mapping[str, Any]) -> None:
        who = body["contributor"]
        if who not in self._current or not self.is_revoked(who):
            raise _corrupt(who, "it got a different key, but its own was not revoked")
        self._give(who, body["public_key"], body["at"])

    def _give(self, who: str, key: str, at: int) -> None:
        if key in self.keys:
            raise _corrupt(who, f"key {key[:16]} was used before")
        if len(bytes.fromhex(key)) != 32:
            raise _corrupt(who, "an invalid key")
        self.keys[key] = Key(who, ACTIVE, at)
        self._current[who] = key

    def _end(self, key: str, status: str, at: int) -> None:
        self.keys[key].status, self.keys[key].until = status, at

    def _good(self, who: str, what: str) -> str:
        """Return the account's newest key; raise ``STATE_CORRUPT`` if it has none or the key is revoked."""
        key = self._current.get(who)
        if key is None or self.keys[key].status != ACTIVE:
            raise _corrupt(who, f"{what} without a valid key")
        return key

    def _check_said(self, who: str, statement: Statement, at: int) -> None:
        if self._server is not None and statement.server != self._server:
            raise _corrupt(who, f"a statement for {statement.server[:24]}")
        if abs(at - statement.issued_at) > CLOCK_SKEW_SECONDS + _ANSWER_SECONDS:
            raise _corrupt(who, "a statement with a different time")

    # ---- credits ----

    def _transfer(self, kind: str, body: Mapping[str, Any]) -> None:
        who, name = body["from"], body["transfer"]
        key = self._good(who, "a transfer")
        try:
            order = TransferOrder.model_validate(body["statement"])
            if (order.digest, order.sender, order.to, order.amount) != (
                name,
                who,
                body["to"],
                body["amount"],
            ):
                raise _corrupt(who, "its statement is about something else")
            order.verify(bytes.fromhex(key), bytes.fromhex(body["signature"]))
        except (ValueError, GymError) as error:
            raise _corrupt(who, f"transfer {name[:12]} is not signed by its key ({error})") from error
        self._check_said(who, order, body["at"])
        if order.amount <= 0 or name in self.moves or (who, order.nonce) in self._nonces:
            raise _corrupt(who, f"transfer {name[:12]} was recorded before, or transfers nothing")
        self._nonces.add((who, order.nonce))
        self.moves[name] = Move(
            who, order.to, order.amount, float(body["hold_seconds"]), order.nonce, PENDING, body["at"]
        )

    def _closed(self, kind: str, body: Mapping[str, Any]) -> None:
        name, at = body["transfer"], body["at"]
        move = self.moves.get(name)
        recorded = (body["from"], body["to"], body["amount"])
        if move is None or move.status != PENDING or (move.sender, move.recipient, move.amount) != recorded:
            raise _corrupt(body["from"], f"transfer {name[:12]} ends, but is not pending")
        move.status, move.closed_at = kind.removeprefix("transfer-"), at
        changed = self.keys[self._current[move.sender]].since
        if (
            kind == "transfer-settled"
            and at < max(move.asked_at, changed) + move.hold_seconds - _SLACK_SECONDS
        ):
            raise _corrupt(move.sender, f"transfer {name[:12]} settled within its hold period")

    def _recorded_once(self, kind: str, body: Mapping[str, Any]) -> None:
        who, subject = body["contributor"] if kind == "credit" else "", body[_ONCE[kind]]
        if (kind, who, subject) in self._once:
            raise _corrupt(who or kind, f"{kind} {str(subject)[:24]} is recorded twice")
        self._once.add((kind, who, subject))


def key_at(entries: Iterable[Mapping[str, Any]], contributor: str, at: float | None = None) -> bytes:
    """Return the key of an account at a given time.

    Args:
        entries: All ledger entries in order, each with ``kind`` and ``body``; unrelated kinds are skipped.
        contributor: Id of the account.
        at: Time in Unix seconds; None for the end of the entries.

    Returns:
        The 32-byte public key.

    Raises:
        GymError: ``NOT_FOUND`` if the account was not enrolled; ``KEY_REVOKED`` if its key was revoked at that time;
            ``STATE_CORRUPT`` for an entry that no owner signed.
    """
    history = History()
    for entry in entries:
        body = entry["body"]
        of_it = entry["kind"] in _KEY_KINDS and body.get("contributor") == contributor
        if of_it and (at is None or body["at"] <= at):
            history.add(entry["kind"], body)
    key = history.current(contributor)
    if key is None:
        raise GymError(ErrorCode.NOT_FOUND, f"the ledger has no contributor {contributor!r} at that time")
    if history.is_revoked(contributor):
        raise GymError(ErrorCode.KEY_REVOKED, f"the key of {contributor} was revoked")
    return key


def _corrupt(contributor: str, what: str) -> GymError:
    return GymError(
        ErrorCode.STATE_CORRUPT,
        f"ledger: {contributor}: {what}",
        "do not trust this hub; ask its coordinator",
    )
