"""Enrolment and login: one-time invites, the claims that a contributor signs, and proof of work.

An invite is a link with an address, a fingerprint and a token: ``gym://HOST:PORT/FINGERPRINT_HEX/TOKEN``. The link of a
hub that is open to everybody has no token. The hub stores only the SHA-256 of a token.

Both claims contain the hub's id and the TLS key of the contributor's connection. A hub that imitates another hub's id
has a different TLS key, so a claim that was made to it is invalid at the other hub.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import counted, plain
from gym_fed.trust.wire.limits import PROTOCOL

MAX_WORK_BITS = 24
"""Maximum proof of work, in bits, that a hub may request: 16 million hashes, about half a minute."""

_HASHES_BETWEEN_LOOKS = 1 << 14

PLAIN_TEXT = ""
"""Value in place of the TLS key on a connection without TLS, which is only possible on loopback."""


def enrolment_claim(name: str, invite: str, server: str, tls_fingerprint: str) -> dict[str, object]:
    """Return the claim that a contributor's key signs to enrol.

    Args:
        name: Name of the account, shown to the coordinator and in the ledger.
        invite: Token of an invite; empty if there is none.
        server: Id of the hub.
        tls_fingerprint: ``sha256:<hex>`` of the connection's TLS key, or ``PLAIN_TEXT``.
    """
    return {"enrol": name, "invite": invite, "protocol": PROTOCOL, "server": server, "tls": tls_fingerprint}


def login_claim(
    contributor: str, instance: str, issued_at: int, nonce: str, server: str, tls_fingerprint: str
) -> dict[str, object]:
    """Return the claim that an account's key signs to open a session; ``issued_at`` in Unix seconds."""
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
    """Return True if ``sha256(server, public_key, work)`` begins with ``bits`` zero bits (Hashcash, Back 2002)."""
    digest = hashlib.sha256(server.encode() + public_key + work).digest()
    return int.from_bytes(digest, "big") >> (256 - bits) == 0


def do_work(
    server: str, public_key: bytes, bits: int, should_stop: Callable[[], bool] = lambda: False
) -> bytes:
    """Find a ``work`` that ``work_is_done`` accepts, which takes 2**bits hashes on average.

    Raises:
        GymError: ``POLICY_REFUSED`` for more than ``MAX_WORK_BITS``; ``INTERRUPTED`` after ``should_stop`` returns
            True.
    """
    if bits > MAX_WORK_BITS:
        raise GymError(
            ErrorCode.POLICY_REFUSED,
            f"the hub demands a proof of work of {counted(bits, 'bit')}; more than {MAX_WORK_BITS} is never needed",
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


INVITE_SCHEME = "gym://"
_PATTERN = re.compile(
    r"gym://(?P<host>[A-Za-z0-9._:%\[\]-]{1,255}):(?P<port>[0-9]{1,5})/(?P<fingerprint>[0-9a-f]{64})(?:/(?P<token>[0-9a-f]{32}))?(?![\w/])"
)


@dataclass(frozen=True)
class Invite:
    """A parsed invite."""

    host: str
    port: int
    fingerprint: str
    """``sha256:`` and 64 hex digits, as returned by ``gym_fed.trust.identity.tls.fingerprint``."""
    token: str


def new_token() -> str:
    """Generate a token of 128 random bits, in hex."""
    return secrets.token_hex(16)


def token_hash(token: str) -> str:
    """Return the hash of a token; the hub stores only this hash."""
    return hashlib.sha256(token.encode()).hexdigest()


def format_invite(invite: Invite) -> str:
    """Return the link of an invite."""
    fingerprint = invite.fingerprint.removeprefix("sha256:")
    link = f"{INVITE_SCHEME}{invite.host}:{invite.port}/{fingerprint}"
    return f"{link}/{invite.token}" if invite.token else link


def find_invite(text: str) -> str:
    """Return the first invite in a message. If there is none, return the whole text, which may be a token."""
    match = _PATTERN.search(text)
    return text.strip() if match is None else match[0]


def require_link(text: str) -> str:
    """Check that a link from the operating system is exactly one invite, and return it.

    Raises:
        GymError: ``INVITE_INVALID`` for any other text, such as two invites or a truncated one.
    """
    if _PATTERN.fullmatch(text) is None:
        raise _not_an_invite(text)
    parse_invite(text)
    return text


def parse_invite(text: str) -> Invite:
    """Parse an invite. Raises ``INVITE_INVALID`` if the text is not one."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise _not_an_invite(text)
    port = int(match["port"])
    if not 0 < port < 65536:
        raise GymError(ErrorCode.INVITE_INVALID, f"invite: port {port} is invalid")
    return Invite(match["host"], port, "sha256:" + match["fingerprint"], match["token"] or "")


def _not_an_invite(text: str) -> GymError:
    return GymError(
        ErrorCode.INVITE_INVALID,
        f"{plain(text, 40)!r} is not an invite",
        "an invite has the form gym://HOST:PORT/FINGERPRINT/TOKEN; gym-server invites create creates one",
    )
