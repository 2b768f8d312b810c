"""The claims that a contributor signs to enrol and to log in, and proof of work.

Both claims name the hub's id and the TLS key that the contributor's own connection shows. A hub that copies another
one's id cannot copy its TLS key, so a claim that was made to it is useless at another hub.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.wire.limits import PROTOCOL

MAX_WORK_BITS = 24
"""More proof of work than this no contributor does, and no hub may ask for: 16 million hashes, half a minute."""

_HASHES_BETWEEN_LOOKS = 1 << 14

PLAIN_TEXT = ""
"""Stands for the TLS key on a connection without TLS, which is possible on loopback only."""


def enrolment_claim(name: str, invite: str, server: str, tls_fingerprint: str) -> dict[str, object]:
    """The claim that an enrolling key signs.

    Args:
        name: Shown to the coordinator and in the ledger.
        invite: Token of an invite, or empty.
        server: Id of the hub.
        tls_fingerprint: ``sha256:<hex>`` of the TLS key on the caller's own connection, or ``PLAIN_TEXT``.
    """
    return {"enrol": name, "invite": invite, "protocol": PROTOCOL, "server": server, "tls": tls_fingerprint}


def login_claim(
    contributor: str, instance: str, issued_at: int, nonce: str, server: str, tls_fingerprint: str
) -> dict[str, object]:
    """The claim that an account's key signs to open a session; ``issued_at`` in Unix seconds."""
    return {
        "authenticate": contributor,
        "instance": instance,
        "issued_at": issued_at,
        "nonce": nonce,
        "protocol": PROTOCOL,
        "server": server,
        "tls": tls_fingerprint,
    }


def work_is_done(server: str, public_key: bytes, work: bytes, bits: int) -> bool:
    """True if ``sha256(server, public_key, work)`` begins with ``bits`` zero bits (Hashcash, Back 2002)."""
    digest = hashlib.sha256(server.encode() + public_key + work).digest()
    return int.from_bytes(digest, "big") >> (256 - bits) == 0


def do_work(
    server: str, public_key: bytes, bits: int, should_stop: Callable[[], bool] = lambda: False
) -> bytes:
    """Find ``work`` that ``work_is_done`` accepts; takes 2**bits hashes on average.

    Raises:
        GymError: ``POLICY_REFUSED`` for more than ``MAX_WORK_BITS``; ``INTERRUPTED`` once ``should_stop`` says so.
    """
    if bits > MAX_WORK_BITS:
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the hub demands a proof of work of {bits} bits; more than {MAX_WORK_BITS} is never needed",
            "report it to its coordinator: limits.enrolment_work_bits",
        )
    prefix = hashlib.sha256(server.encode() + public_key)
    for number in range(2**64):
        if number % _HASHES_BETWEEN_LOOKS == 0 and should_stop():
            raise GymError(ErrorCode.INTERRUPTED, "stopped before enrolment", "run the same command again")
        work = number.to_bytes(8, "big")
        attempt = prefix.copy()
        attempt.update(work)
        if int.from_bytes(attempt.digest(), "big") >> (256 - bits) == 0:
            return work
    raise AssertionError("unreachable")
