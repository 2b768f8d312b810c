"""Logins at a mirror: those of one account cannot end the sessions of another."""

from __future__ import annotations

import secrets

import pytest
from gym_server.mirror import accounts
from gym_server.mirror.accounts import MirrorAccounts

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey, contributor_id
from gym_fed.trust.identity.login import login_claim
from gym_fed.trust.ledger.entries import Entry
from gym_fed.trust.wire.v1 import hub_pb2 as pb

SERVER, TLS = "s" + "0" * 16, f"sha256:{'a' * 64}"


def login(mirror: MirrorAccounts, key: SigningKey) -> str:
    who, nonce = contributor_id(key.public_key), secrets.token_hex(16)
    signature = key.sign(login_claim(who, "instance", 0, nonce, SERVER, TLS))
    request = pb.AuthenticateRequest(contributor=who, instance="instance", nonce=nonce, signature=signature)
    return mirror.authenticate(request)[0]


def test_many_logins_of_one_account_end_its_own_sessions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_MAX_SESSIONS", 20)
    mirror, keys, last = MirrorAccounts(TLS), [SigningKey.generate() for _ in range(2)], None
    mirror.begin(SERVER)
    for key in keys:
        who = contributor_id(key.public_key)
        body = {"contributor": who, "name": "n", "public_key": key.public_key.hex(), "at": 1}
        last = Entry.following((last.sequence, last.hash) if last else None, "enrolled", body)
        mirror.add(last)
    own = login(mirror, keys[0])
    flood = [login(mirror, keys[1]) for _ in range(25)]
    assert mirror.session(own).contributor == contributor_id(keys[0].public_key)
    assert mirror.session(flood[-1])
    with pytest.raises(GymError) as error:
        mirror.session(flood[0])
    assert error.value.code is ErrorCode.UNAUTHENTICATED
