"""One-time invites: address, fingerprint and token in one string that can be mailed.

``gym-invite:HOST:PORT:FINGERPRINT_HEX:TOKEN``. The hub stores only the token's sha256.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from dataclasses import dataclass

from gym_fed.core.errors import ErrorCode, GymError

_PATTERN = re.compile(
    r"gym-invite:(?P<host>[^\s]+):(?P<port>\d{1,5}):(?P<fingerprint>[0-9a-f]{64}):(?P<token>[0-9a-f]{32})"
)


@dataclass(frozen=True)
class Invite:
    """The contents of an invite."""

    host: str
    port: int
    fingerprint: str
    """``sha256:`` and 64 hex digits, as ``gym_fed.trust.identity.tls.fingerprint`` gives it."""
    token: str


def new_token() -> str:
    """128 random bits in hex."""
    return secrets.token_hex(16)


def token_hash(token: str) -> str:
    """The hash of a token, which the hub stores."""
    return hashlib.sha256(token.encode()).hexdigest()


def format_invite(invite: Invite) -> str:
    return (
        f"gym-invite:{invite.host}:{invite.port}:{invite.fingerprint.removeprefix('sha256:')}:{invite.token}"
    )


def parse_invite(text: str) -> Invite:
    """Parse an invite; raises ``INVITE_INVALID`` if the text is none."""
    match = _PATTERN.fullmatch(text.strip())
    if match is None:
        raise GymError(
            ErrorCode.INVITE_INVALID,
            f"{text[:40]!r} is not an invite",
            "an invite reads gym-invite:HOST:PORT:FINGERPRINT:TOKEN; gym-server invites create makes one",
        )
    port = int(match["port"])
    if not 0 < port < 65536:
        raise GymError(ErrorCode.INVITE_INVALID, f"invite: port {port} does not exist")
    return Invite(match["host"], port, "sha256:" + match["fingerprint"], match["token"])
