"""The key history of accounts; every rotation, revocation and rebinding is recorded in the ledger.

An account keeps the id that is derived from its first key. Exactly one of its keys is active, or none after a
revocation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, func, select, update

from gym_fed.config.hub.sections import LimitsConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import PUBLIC_KEY_BYTES, verify_signature
from gym_fed.trust.identity.manifest import UpdateManifest
from gym_fed.trust.identity.statements import Revocation, Rotation
from gym_server.ledger.chain import Ledger
from gym_server.ledger.pace import require_pace
from gym_server.rewards.payouts import Payouts
from gym_server.rounds.queue import disconnect
from gym_server.store.database import Database, rerun
from gym_server.store.tables import account_keys, accounts, key_refusals, rounds

ACTIVE, ROTATED, REVOKED = "active", "rotated", "revoked"
_CHANGES = ("enrolled", "rotated")
"""Kinds of ledger entries that an account can create by itself, and whose rate is therefore limited."""
_FORMER_KEYS_TRIED = 20
"""Number of former keys, newest first, to check an invalid signature against; bounded, since anybody may send one."""


class RevokedKey(GymError):
    """Error for a revoked key, raised only if the caller has proven possession of it."""

    def __init__(self, contributor: str) -> None:
        super().__init__(
            ErrorCode.KEY_REVOKED,
            f"the key of {contributor} was revoked on this hub",
            "create a new key in another home, and ask the coordinator to run gym-server rebind",
        )
        self.contributor = contributor


class Keys:
    """The key history of one hub.

    Args:
        database: The hub's database.
        ledger: Ledger that records every change.
        server: Id of the hub.
        tls: Fingerprint of the hub's TLS key, which statements name; ``PLAIN_TEXT`` if it has none.
        payouts: Transfers that a revocation cancels.
        hold_seconds: How long a replaced key can still revoke the account, in seconds.
        per_hour: Maximum number of key changes and returns per account and hour.
        clock: Clock, Unix seconds; tests pass their own.
    """

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        server: str,
        tls: str,
        payouts: Payouts,
        hold_seconds: float,
        per_hour: int = LimitsConfig().account_changes_per_hour,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._server = server
        self._tls = tls
        self._payouts = payouts
        self._hold = hold_seconds
        self._per_hour = per_hour
        self._clock = clock

    # ---- reading ----

    def owner(self, public_key: bytes) -> str:
        """Return the account that has or had a key.

        Raises:
            GymError: ``UNAUTHENTICATED`` if there is none.
        """
        with self._database.reading() as tx:
            row = key_row(tx, public_key)
        if row is None:
            raise GymError(
                ErrorCode.UNAUTHENTICATED, "this key is not enrolled on this hub", "enrol it first"
            )
        return str(row.contributor)

    def history_of(self, contributor: str) -> list[dict[str, Any]]:
        """Return an account's keys, oldest first."""
        return self.history(contributor).get(contributor, [])

    def history(self, contributor: str | None = None) -> dict[str, list[dict[str, Any]]]:
        """Return the keys of every account, or of one, oldest first."""
        keys: dict[str, list[dict[str, Any]]] = {}
        query = select(account_keys).order_by(account_keys.c.valid_from)
        if contributor is not None:
            query = query.where(account_keys.c.contributor == contributor)
        with self._database.reading() as tx:
            for row in tx.execute(query):
                keys.setdefault(row.contributor, []).append(
                    {
                        "public_key": row.public_key.hex(),
                        "status": row.status,
                        "from": row.valid_from,
                        "until": row.valid_until,
                    }
                )
        return keys

    def signed_by_revoked(self, rows: Sequence[Any]) -> set[str]:
        """Return the ids of the ``updates`` rows whose signing key has been revoked."""
        with self._database.reading() as tx:
            return {str(row.update_id) for row in rows if is_signed_by_revoked(tx, row)}

    def require_pace(self, tx: Connection, contributor: str) -> None:
        """Check the rate limit on key changes and returns, which keeps the ledger and the key history short.

        Raises:
            GymError: ``BUSY`` if the account has reached the limit within the last hour.
        """
        what = "replaced its key or returned"
        require_pace(tx, contributor, _CHANGES, self._per_hour, self._clock(), what)

    # ---- changes ----

    def first(self, tx: Connection, contributor: str, public_key: bytes) -> None:
        """Record the key that an account enrols with."""
        tx.execute(
            account_keys.insert().values(
                public_key=public_key, contributor=contributor, status=ACTIVE, valid_from=self._clock()
            )
        )

    @rerun
    def rotate(
        self, statement_json: str, signature: bytes, new_key: bytes, new_signature: bytes
    ) -> dict[str, Any]:
        """Replace an account's key; repeating a rotation returns the same answer.

        Sessions of the old key end. Open tasks stay open, and are answered under the new key.

        Raises:
            GymError: ``SIGNATURE_INVALID``, ``STALE``; ``KEY_REVOKED`` if the old key is no longer the account's;
                ``USAGE`` if the new key was used before.
        """
        statement = Rotation.parse(statement_json)
        if statement.new_key != new_key.hex():
            raise GymError(ErrorCode.USAGE, "the new key in the statement differs from the one sent")
        statement.verify(new_key, new_signature)
        statement.check_fresh(self._server, self._tls, self._clock())
        with self._database.transaction() as tx:
            account = _account(tx, statement.rotate)
            if account.public_key == new_key:
                self._check_signed_before(tx, statement, signature)
                return {"contributor": statement.rotate, "public_key": new_key.hex()}
            check_signer(tx, account, statement.signed(), signature)
            self._check_unused(tx, new_key)
            self.require_pace(tx, statement.rotate)
            self._replace(tx, account, new_key, ROTATED)
            body = {
                "contributor": statement.rotate,
                "public_key": new_key.hex(),
                "previous_key": account.public_key.hex(),
                "statement": statement.signed(),
                "signature": signature.hex(),
                "new_signature": new_signature.hex(),
            }
            self._ledger.append(tx, "rotated", body)
        return {"contributor": statement.rotate, "public_key": new_key.hex()}

    @rerun
    def revoke(
        self, contributor: str, signing_key: bytes, statement_json: str, signature: bytes
    ) -> dict[str, Any]:
        """Revoke an account's key, by a statement signed by it or by one that it replaced within the hold period.

        Raises:
            GymError: ``SIGNATURE_INVALID``, ``STALE``; ``PERMISSION_DENIED`` if the signing key may not revoke it.
        """
        statement = Revocation.parse(statement_json)
        if (statement.revoke, statement.key) != (contributor, signing_key.hex()):
            raise GymError(
                ErrorCode.USAGE, "the statement is for a different account or key than the request"
            )
        statement.verify(signing_key, signature)
        statement.check_fresh(self._server, self._tls, self._clock())
        with self._database.transaction() as tx:
            account, signer = _account(tx, contributor), key_row(tx, signing_key)
            if signer is None or signer.contributor != contributor:
                raise GymError(ErrorCode.PERMISSION_DENIED, f"{contributor} never had the signing key")
            if signer.status == REVOKED and account.status == REVOKED:
                return {"contributor": contributor, "revoked": account.public_key.hex()}
            if signer.status != ACTIVE and not self._replaced_lately(signer):
                raise GymError(
                    ErrorCode.PERMISSION_DENIED,
                    f"the signing key was replaced more than {self._hold:g} s ago, or revoked",
                    "ask the coordinator to run gym-server revoke",
                )
            proof = {"by": "owner", "statement": statement.signed(), "signature": signature.hex()}
            self._revoke(tx, account, proof)
        return {"contributor": contributor, "revoked": account.public_key.hex()}

    @rerun
    def revoke_as_coordinator(self, contributor: str, reason: str) -> dict[str, Any]:
        """Revoke an account's key on behalf of the coordinator.

        Raises:
            GymError: ``NOT_FOUND``; ``KEY_REVOKED`` if it was revoked before.
        """
        with self._database.transaction() as tx:
            account = _account(tx, contributor)
            if account.status == REVOKED:
                raise GymError(ErrorCode.KEY_REVOKED, f"the key of {contributor} is already revoked")
            cancelled = self._revoke(tx, account, {"by": "coordinator", "reason": reason})
        return {
            "contributor": contributor,
            "revoked": account.public_key.hex(),
            "cancelled_transfers": cancelled,
        }

    @rerun
    def rebind(self, contributor: str, public_key: bytes) -> dict[str, Any]:
        """Give a new key to an account whose key was revoked.

        Raises:
            GymError: ``NOT_FOUND``; ``USAGE`` if the account's key is valid, or if the new key was used before.
        """
        if len(public_key) != PUBLIC_KEY_BYTES:
            raise GymError(
                ErrorCode.USAGE, f"a public key is {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}"
            )
        with self._database.transaction() as tx:
            account = _account(tx, contributor)
            if account.status != REVOKED:
                raise GymError(
                    ErrorCode.USAGE,
                    f"the key of {contributor} is not revoked",
                    f"gym-server revoke {contributor} --reason ...",
                )
            self._check_unused(tx, public_key)
            self._replace(tx, account, public_key, REVOKED)
            self._ledger.append(
                tx,
                "rebound",
                {"contributor": contributor, "public_key": public_key.hex(), "by": "coordinator"},
            )
        return {"contributor": contributor, "public_key": public_key.hex()}

    @rerun
    def refused(self, contributor: str, call: str) -> None:
        """Record in the ledger that a revoked key was refused, once per contributor and round."""
        with self._database.transaction() as tx:
            server_round = int(tx.scalar(select(func.max(rounds.c.server_round))) or 0)
            row = {"contributor": contributor, "server_round": server_round}
            known = (key_refusals.c.contributor == contributor) & (
                key_refusals.c.server_round == server_round
            )
            if tx.scalar(select(key_refusals.c.contributor).where(known)) is not None:
                return
            tx.execute(key_refusals.insert().values(**row))
            reason = f"{ErrorCode.KEY_REVOKED.value}: {call} with a revoked key"
            self._ledger.append(tx, "verdict", {**row, "verdict": "refused", "reason": reason})

    # ---- helpers ----

    def _revoke(self, tx: Connection, account: Any, proof: dict[str, Any]) -> int:
        """Revoke the account's key and everything authorised by it; return the number of cancelled transfers."""
        now, contributor = self._clock(), account.contributor
        self._payouts.settle(tx)
        keys = account_keys.c.contributor == contributor
        lately = (account_keys.c.status == ROTATED) & (account_keys.c.valid_until >= now - self._hold)
        also = select(account_keys.c.public_key).where(keys, lately).order_by(account_keys.c.valid_from)
        revoked = {"also_revoked": [key.hex() for key in tx.scalars(also)], "hold_seconds": self._hold}
        tx.execute(update(account_keys).where(keys, lately).values(status=REVOKED))
        current = account_keys.c.status == ACTIVE
        tx.execute(update(account_keys).where(keys, current).values(status=REVOKED, valid_until=now))
        tx.execute(update(accounts).where(accounts.c.contributor == contributor).values(status=REVOKED))
        disconnect(tx, contributor)
        body = {"contributor": contributor, "public_key": account.public_key.hex(), **revoked, **proof}
        self._ledger.append(tx, "revoked", body)
        return self._payouts.cancel(tx, contributor, "the sender's key was revoked")

    def _replace(self, tx: Connection, account: Any, new_key: bytes, status: str) -> None:
        now, contributor = self._clock(), account.contributor
        active = (account_keys.c.contributor == contributor) & (account_keys.c.status == ACTIVE)
        tx.execute(update(account_keys).where(active).values(status=status, valid_until=now))
        tx.execute(
            account_keys.insert().values(
                public_key=new_key, contributor=contributor, status=ACTIVE, valid_from=now
            )
        )
        tx.execute(
            update(accounts)
            .where(accounts.c.contributor == contributor)
            .values(public_key=new_key, status="active" if account.status == REVOKED else account.status)
        )

    def _check_unused(self, tx: Connection, public_key: bytes) -> None:
        if key_row(tx, public_key) is not None:
            raise GymError(ErrorCode.USAGE, "the new key was used on this hub before", "create a new one")

    def _check_signed_before(self, tx: Connection, statement: Rotation, signature: bytes) -> None:
        """Check that a repeated rotation, which has already taken effect, was signed by the replaced key."""
        keys = (account_keys.c.contributor == statement.rotate) & (account_keys.c.status == ROTATED)
        newest = select(account_keys.c.public_key).where(keys).order_by(account_keys.c.valid_until.desc())
        statement.verify(bytes(tx.scalar(newest.limit(1)) or b""), signature)

    def _replaced_lately(self, row: Any) -> bool:
        return bool(row.status == ROTATED and row.valid_until >= self._clock() - self._hold)


def key_row(tx: Connection, public_key: bytes) -> Any:
    """Return the row of a key, or None."""
    return tx.execute(select(account_keys).where(account_keys.c.public_key == public_key)).first()


def check_signer(tx: Connection, account: Any, signed: object, signature: bytes) -> None:
    """Check that a statement was signed by the account's current key and that the key is valid.

    Raises:
        GymError: ``KEY_REVOKED`` if it was signed by a revoked or replaced key of the account; ``SIGNATURE_INVALID``.
    """
    try:
        verify_signature(account.public_key, signed, signature)
    except GymError:
        former = signer_of(tx, account.contributor, signed, signature, _FORMER_KEYS_TRIED)
        if former is None:
            raise
        if former.status == REVOKED:
            raise RevokedKey(account.contributor) from None
        raise GymError(
            ErrorCode.KEY_REVOKED,
            f"this key of {account.contributor} was replaced by another key",
            "finish with `gym-client key rotate`; if you did not replace it: `gym-client key revoke`",
        ) from None
    if account.status == REVOKED:
        raise RevokedKey(account.contributor)


def signer_of(
    tx: Connection, contributor: str, signed: object, signature: bytes, most: int | None = None
) -> Any:
    """Return the row of the former key that signed a statement, or None; only the newest ``most`` keys are tried."""
    former = (account_keys.c.contributor == contributor) & (account_keys.c.status != ACTIVE)
    newest = select(account_keys).where(former).order_by(account_keys.c.valid_from.desc()).limit(most)
    for row in tx.execute(newest).all():
        try:
            verify_signature(row.public_key, signed, signature)
        except GymError:
            continue
        return row
    return None


def is_signed_by_revoked(tx: Connection, row: Any) -> bool:
    """Return True if the signing key of a row of ``updates`` has been revoked since."""
    signed = UpdateManifest.parse(row.manifest).model_dump(mode="json")
    signer = signer_of(tx, row.contributor, signed, row.signature)
    return signer is not None and signer.status == REVOKED


def _account(tx: Connection, contributor: str) -> Any:
    row = tx.execute(select(accounts).where(accounts.c.contributor == contributor)).first()
    if row is None:
        raise GymError(ErrorCode.NOT_FOUND, f"no contributor {contributor!r} on this hub")
    return row
