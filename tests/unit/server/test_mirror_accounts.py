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


def login(mirror: MirrorAccounts, key: SigningKey, issued_at: int = 0) -> str:
    who, nonce = contributor_id(key.public_key), secrets.token_hex(16)
    signature = key.sign(login_claim(who, "instance", issued_at, nonce, SERVER, TLS))
    request = pb.AuthenticateRequest(
        contributor=who, instance="instance", issued_at_seconds=issued_at, nonce=nonce, signature=signature
    )
    return mirror.authenticate(request)[0]


def mirror_of(*keys: SigningKey) -> MirrorAccounts:
    """A mirror at time 0 of a hub with an account for each key."""
    mirror, last = MirrorAccounts(TLS, now=lambda: 0.0), None
    mirror.begin(SERVER)
    for key in keys:
        who = contributor_id(key.public_key)
        body = {"contributor": who, "name": "n", "public_key": key.public_key.hex(), "at": 1}
        last = Entry.following((last.sequence, last.hash) if last else None, "enrolled", body)
        mirror.add(last)
    return mirror


def test_a_login_of_long_ago_opens_no_session() -> None:
    key = SigningKey.generate()
    mirror = mirror_of(key)
    assert login(mirror, key)
    for issued_at in (-7200, 7200):
        with pytest.raises(GymError) as error:
            login(mirror, key, issued_at)
        assert error.value.code is ErrorCode.CLOCK_SKEWED


def test_many_logins_of_one_account_end_its_own_sessions_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounts, "_MAX_SESSIONS", 20)
    keys = [SigningKey.generate() for _ in range(2)]
    mirror = mirror_of(*keys)
    own = login(mirror, keys[0])
    flood = [login(mirror, keys[1]) for _ in range(25)]
    assert mirror.session(own).contributor == contributor_id(keys[0].public_key)
    assert mirror.session(flood[-1])
    with pytest.raises(GymError) as error:
        mirror.session(flood[0])
    assert error.value.code is ErrorCode.UNAUTHENTICATED
