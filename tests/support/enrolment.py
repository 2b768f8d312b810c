"""Enrolment of a key at an opened hub, without a wire."""

from __future__ import annotations

from gym_server.federation import Federation

from gym_fed.trust.identity.keys import SigningKey
from gym_fed.trust.identity.login import do_work, enrolment_claim
from tests.support.hub import QUICK_ENROLMENT


def enrol(fed: Federation, key: SigningKey, name: str, invite: str = "") -> str:
    """The id of the account. The hub asks for little work: what it asks for by default takes a second a key."""
    fed.accounts.work_bits = min(fed.accounts.work_bits, QUICK_ENROLMENT["enrolment_work_bits"])
    signature = key.sign(enrolment_claim(name, invite, fed.server, fed.fingerprint))
    work = do_work(fed.server, key.public_key, fed.accounts.work_bits)
    return fed.accounts.enrol(key.public_key, name, invite, signature, work)
