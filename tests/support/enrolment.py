"""Enrolment of a key at an opened hub, without a wire."""

from __future__ import annotations

from gym_server.federation import Federation

from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.login import do_work, enrolment_claim


def enrol(fed: Federation, key: SigningKey, name: str, invite: str = "") -> str:
    """The id of the account."""
    signature = key.sign(enrolment_claim(name, invite, fed.server, fed.fingerprint))
    work = do_work(fed.server, key.public_key, fed.accounts.work_bits)
    return fed.accounts.enrol(key.public_key, name, invite, signature, work)
