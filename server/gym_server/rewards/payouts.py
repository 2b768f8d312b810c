"""Transfers of credits, which settle after a hold period or are cancelled when the sender's key is revoked.

A transfer settles once ``hold_seconds`` have passed since the request and since the sender's key last changed, so that
the owner of a stolen key has that long to revoke it. If the hold period is shortened later, pending transfers keep
theirs. Credits received within the hold period cannot be moved yet. Due transfers settle once, in the transaction of
the next round's commit or of the next query.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection, Select, func, select, update

from gym_fed.config.hub.sections import LimitsConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted
from gym_fed.trust.identity.statements import TransferOrder
from gym_server.ledger.chain import Ledger
from gym_server.ledger.pace import HOUR_SECONDS
from gym_server.store.database import Database, rerun
from gym_server.store.tables import account_keys, accounts, credits, rounds, royalties, transfers

PENDING, SETTLED, CANCELLED = "pending", "settled", "cancelled"
_SHOWN = 100


class Payouts:
    """The transfers of one hub.

    Args:
        database: The hub's database.
        ledger: Ledger that records every step.
        server: Id of the hub.
        tls: Fingerprint of the hub's TLS key, which statements name; ``PLAIN_TEXT`` if it has none.
        hold_seconds: Hold period of new transfers, in seconds.
        per_hour: Maximum number of transfers per account and hour.
        clock: Function that returns the Unix time in seconds; tests pass their own.
    """

    def __init__(
        self,
        database: Database,
        ledger: Ledger,
        server: str,
        tls: str,
        hold_seconds: float,
        per_hour: int = LimitsConfig().transfers_per_hour,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._database = database
        self._ledger = ledger
        self._server = server
        self._tls = tls
        self._hold = hold_seconds
        self._per_hour = per_hour
        self._clock = clock

    @rerun
    def request(self, caller: str, statement_json: str, signature: bytes) -> dict[str, Any]:
        """Record a pending transfer and reserve its amount; a repeated order returns the same answer.

        Raises:
            GymError: ``SIGNATURE_INVALID``, ``STALE``, ``REPLAYED``; ``TRANSFER_REFUSED`` with the reason.
        """
        order = TransferOrder.parse(statement_json)
        with self._database.transaction() as tx:
            now = self._clock()
            sender = tx.execute(select(accounts).where(accounts.c.contributor == caller)).one()
            if order.sender != caller:
                raise GymError(
                    ErrorCode.SIGNATURE_INVALID, f"{caller} cannot transfer the credits of {order.sender}"
                )
            order.verify(sender.public_key, signature)
            known = tx.execute(select(transfers).where(transfers.c.transfer == order.digest)).first()
            if known is None:
                order.check_fresh(self._server, self._tls, now)
                self._check_pace(tx, caller, now)
                self.settle(tx)
                self._check(tx, order)
                self._enter(tx, order, signature, now)
                known = tx.execute(select(transfers).where(transfers.c.transfer == order.digest)).one()
            return self._transfer_of(tx, known)

    def settle(self, tx: Connection) -> int:
        """Settle due transfers in the caller's transaction; return their number."""
        rows = tx.execute(self._due()).all()
        for row in rows:
            self._close(tx, row, SETTLED, {})
        return len(rows)

    @rerun
    def settle_due(self) -> None:
        """Settle due transfers in a separate transaction, if there are any."""
        with self._database.reading() as tx:
            if tx.execute(self._due().limit(1)).first() is None:
                return
        with self._database.transaction() as tx:
            self.settle(tx)

    def cancel(self, tx: Connection, contributor: str, reason: str) -> int:
        """Cancel a contributor's pending transfers, which frees their credits; return their number."""
        rows = tx.execute(
            select(transfers).where(transfers.c.sender == contributor, transfers.c.status == PENDING)
        ).all()
        for row in rows:
            self._close(tx, row, CANCELLED, {"reason": reason})
        return len(rows)

    def balance_and_transfers(self, contributor: str) -> dict[str, Any]:
        """Return ``balance``, with its ``available`` (movable) and ``held`` parts, ``reserved`` and ``transfers``."""
        self.settle_due()
        with self._database.reading() as tx:
            rows = tx.execute(
                select(transfers)
                .where((transfers.c.sender == contributor) | (transfers.c.recipient == contributor))
                .order_by(transfers.c.asked_at.desc())
                .limit(_SHOWN)
            ).all()
            return {
                **self.balance_of(tx, contributor),
                "transfers": [self._transfer_of(tx, row) for row in rows],
            }

    def balance_of(self, tx: Connection, contributor: str) -> dict[str, int]:
        """Return a contributor's balance: credits earned and received, without those sent or reserved for transfers."""
        young = self._clock() - self._hold
        mine = credits.c.contributor == contributor
        earned = select(func.sum(credits.c.amount)).where(mine)
        earned_lately = (
            select(func.sum(credits.c.amount))
            .outerjoin(rounds, rounds.c.server_round == credits.c.server_round)
            .where(mine, (rounds.c.closed_at > young) | rounds.c.closed_at.is_(None))
        )
        used = select(func.sum(royalties.c.amount)).where(royalties.c.contributor == contributor)
        moved = select(func.sum(transfers.c.amount))
        received = moved.where(transfers.c.recipient == contributor, transfers.c.status == SETTLED)
        sent = moved.where(transfers.c.sender == contributor)
        reserved = _number(tx, sent.where(transfers.c.status == PENDING))
        balance = _number(tx, earned) + _number(tx, used) + _number(tx, received) - reserved
        balance -= _number(tx, sent.where(transfers.c.status == SETTLED))
        held = _number(tx, earned_lately) + _number(tx, received.where(transfers.c.closed_at > young))
        held += _number(tx, used.where(royalties.c.recorded_at > young))
        return {
            "balance": balance,
            "available": max(0, balance - held),
            "held": min(held, balance),
            "reserved": reserved,
        }

    def balances(self, tx: Connection) -> dict[str, int]:
        """Return the balance, as in ``balance_of``, of every contributor who has or had credits."""
        open_or_settled = transfers.c.status.in_((PENDING, SETTLED))
        parts = (
            (1, credits.c.contributor, credits.c.amount, None),
            (1, royalties.c.contributor, royalties.c.amount, None),
            (1, transfers.c.recipient, transfers.c.amount, transfers.c.status == SETTLED),
            (-1, transfers.c.sender, transfers.c.amount, open_or_settled),
        )
        found: dict[str, int] = {}
        for sign, who, amount, condition in parts:
            query = select(who, func.sum(amount)).group_by(who)
            for contributor, total in tx.execute(query if condition is None else query.where(condition)):
                found[contributor] = found.get(contributor, 0) + sign * int(total)
        return found

    def _check_pace(self, tx: Connection, sender: str, now: float) -> None:
        """Check the sender's rate limit on transfers, each of which adds two ledger entries."""
        mine = select(transfers.c.asked_at).where(transfers.c.sender == sender)
        earliest = tx.scalar(mine.order_by(transfers.c.asked_at.desc()).offset(self._per_hour - 1).limit(1))
        if earliest is not None and earliest + HOUR_SECONDS > now:
            raise GymError(
                ErrorCode.BUSY,
                f"{sender} requested {counted(self._per_hour, 'transfer')} within an hour",
                f"try again in {counted(round((earliest + HOUR_SECONDS - now) / 60), 'minute')}",
            )

    def _check(self, tx: Connection, order: TransferOrder) -> None:
        used = select(transfers.c.transfer).where(
            transfers.c.sender == order.sender, transfers.c.nonce == order.nonce
        )
        if tx.scalar(used) is not None:
            raise GymError(ErrorCode.REPLAYED, f"nonce {order.nonce} was used for another transfer")
        if order.amount <= 0:
            raise _refused(f"the amount is {order.amount}", "transfer at least 1 credit")
        if order.to == order.sender:
            raise _refused(
                f"{order.to} cannot transfer credits to itself", "pass another contributor with --to"
            )
        status = tx.scalar(select(accounts.c.status).where(accounts.c.contributor == order.to))
        if status is None:
            raise _refused(f"no contributor {order.to!r} on this hub", "ask for their id: gym-client id")
        if status == "revoked":
            raise _refused(f"the key of {order.to} was revoked", "ask for another id")
        balance = self.balance_of(tx, order.sender)
        if order.amount > balance["available"]:
            raise _refused(
                f"{counted(order.amount, 'credit')} requested, but only {balance['available']} of {balance['balance']} "
                "can be moved",
                f"{balance['held']} are younger than the hold period of {self._hold:g} s, "
                f"{balance['reserved']} are reserved for other transfers",
            )

    def _enter(self, tx: Connection, order: TransferOrder, signature: bytes, now: float) -> None:
        tx.execute(
            transfers.insert().values(
                transfer=order.digest,
                sender=order.sender,
                recipient=order.to,
                amount=order.amount,
                nonce=order.nonce,
                status=PENDING,
                hold_seconds=self._hold,
                asked_at=now,
            )
        )
        body = {
            "transfer": order.digest,
            "from": order.sender,
            "to": order.to,
            "amount": order.amount,
            "hold_seconds": self._hold,
            "statement": order.signed(),
            "signature": signature.hex(),
        }
        self._ledger.append(tx, "transfer", body)

    def _close(self, tx: Connection, row: Any, status: str, details: dict[str, Any]) -> None:
        tx.execute(
            update(transfers)
            .where(transfers.c.transfer == row.transfer, transfers.c.status == PENDING)
            .values(status=status, closed_at=self._clock())
        )
        body = {
            "transfer": row.transfer,
            "from": row.sender,
            "to": row.recipient,
            "amount": row.amount,
            **details,
        }
        self._ledger.append(tx, f"transfer-{status}", body)

    def _due(self) -> Select[Any]:
        now = self._clock()
        ripe = now - self._hold
        return (
            select(transfers)
            .join(account_keys, account_keys.c.contributor == transfers.c.sender)
            .where(
                transfers.c.status == PENDING,
                transfers.c.asked_at <= ripe,
                transfers.c.asked_at + transfers.c.hold_seconds <= now,
                account_keys.c.status == "active",
                account_keys.c.valid_from <= ripe,
                account_keys.c.valid_from + transfers.c.hold_seconds <= now,
            )
            .order_by(transfers.c.asked_at, transfers.c.transfer)
        )

    def _transfer_of(self, tx: Connection, row: Any) -> dict[str, Any]:
        transfer = {
            "transfer": row.transfer,
            "from": row.sender,
            "to": row.recipient,
            "amount": row.amount,
            "status": row.status,
            "asked_at": int(row.asked_at),
        }
        if row.status == PENDING:
            where = (account_keys.c.contributor == row.sender) & (account_keys.c.status == "active")
            changed = float(tx.scalar(select(account_keys.c.valid_from).where(where)) or 0.0)
            transfer["settles_at"] = int(max(row.asked_at, changed) + max(row.hold_seconds, self._hold))
        return transfer


def _number(tx: Connection, query: Select[Any]) -> int:
    return int(tx.scalar(query) or 0)


def _refused(message: str, hint: str) -> GymError:
    return GymError(ErrorCode.TRANSFER_REFUSED, message, hint)
