"""A hub's parts that know keys and credits, for tests that set the time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from gym_server.accounts.accounts import Accounts, Session
from gym_server.accounts.keys import Keys
from gym_server.ledger.chain import Ledger
from gym_server.rewards.payouts import Payouts
from gym_server.store.database import Database
from gym_server.store.tables import credits, rounds
from sqlalchemy import func, select

from gym_fed.config.hub.sections import EnrolmentConfig
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey, server_id
from gym_fed.trust.identity.login import PLAIN_TEXT, enrolment_claim, login_claim
from gym_fed.trust.identity.statements import Revocation, Rotation, TransferOrder

HOLD = 1000.0


class Hub:
    """The parts of a hub that know keys and credits, at a time that the test sets."""

    def __init__(self, folder: Path) -> None:
        self.now = time.time()
        self.database = Database.open("sqlite:///hub.db", folder)
        key = SigningKey.generate()
        self.server = server_id(key.public_key)
        clock = lambda: self.now  # noqa: E731
        self.ledger = Ledger(self.database, key, clock=clock)
        self.payouts = Payouts(self.database, self.ledger, self.server, PLAIN_TEXT, HOLD, clock=clock)
        self.keys = Keys(self.database, self.ledger, self.server, PLAIN_TEXT, self.payouts, HOLD, clock=clock)
        policy = EnrolmentConfig(policy="open")
        self.accounts = Accounts(
            self.database, self.ledger, self.keys, policy, self.server, PLAIN_TEXT, b"s" * 32
        )

    def enrol(self, key: SigningKey, name: str = "n") -> str:
        signed = enrolment_claim(name, "", self.server, PLAIN_TEXT)
        return self.accounts.enrol(key.public_key, name, "", key.sign(signed))

    def log_in(self, contributor: str, key: SigningKey) -> Session:
        now = int(time.time())
        claim = login_claim(contributor, "instance1", now, "n", self.server, PLAIN_TEXT)
        token, _, _ = self.accounts.authenticate(contributor, "instance1", now, "n", key.sign(claim))
        return self.accounts.session(token)

    def earn(self, contributor: str, amount: int) -> None:
        with self.database.transaction() as tx:
            number = int(tx.scalar(select(func.max(rounds.c.server_round))) or 0) + 1
            row = {"server_round": number, "state": "merging", "base_height": 0, "opened_at": self.now}
            tx.execute(rounds.insert().values(**row, closed_at=self.now, reason=""))
            paid = {"server_round": number, "contributor": contributor, "amount": amount}
            tx.execute(credits.insert().values(**paid))
            self.ledger.append(tx, "credit", paid)

    def rotate(self, contributor: str, old: SigningKey, new: SigningKey) -> dict[str, Any]:
        said = Rotation(
            rotate=contributor,
            new_key=new.public_key.hex(),
            server=self.server,
            tls=PLAIN_TEXT,
            issued_at=int(self.now),
        )
        return self.keys.rotate(said.to_json(), said.sign(old), new.public_key, said.sign(new))

    def revoke(self, contributor: str, key: SigningKey) -> dict[str, Any]:
        said = Revocation(
            revoke=contributor,
            key=key.public_key.hex(),
            server=self.server,
            tls=PLAIN_TEXT,
            issued_at=int(self.now),
        )
        return self.keys.revoke(contributor, key.public_key, said.to_json(), said.sign(key))

    def transfer(self, sender: str, key: SigningKey, to: str, amount: int) -> dict[str, Any]:
        order = TransferOrder(
            sender=sender,
            to=to,
            amount=amount,
            server=self.server,
            tls=PLAIN_TEXT,
            issued_at=int(self.now),
        )
        return self.payouts.request(sender, order.to_json(), order.sign(key))

    def kinds(self) -> list[str]:
        return [entry.kind for entry in self.ledger.entries()]

    def code(self, call: Any, *arguments: Any) -> ErrorCode:
        with pytest.raises(GymError) as caught:
            call(*arguments)
        return caught.value.code
