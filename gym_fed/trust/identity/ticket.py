"""Tickets from a hub, each for one download from a contributor who seeds.

A ticket identifies the object, and the seeder by the fingerprint of its TLS key. It contains no account: a seeder
learns nothing about the downloader except the address of the connection. A stolen ticket allows one download of a
public object, for a short time.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.trust.identity.keys import SigningKey, verify_signature

FORMAT = "gym-seed-ticket-1"
MAX_TICKET_CHARS = 2048
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True)
class SeedTicket:
    """A ticket for fetching one object from one seeder.

    Attributes:
        server: Id of the hub.
        seeder: ``sha256:<hex>`` of the seeder's TLS key.
        sha256: Digest of the object.
        nonce: Random text that makes the ticket unique.
        expires_at_seconds: Time by the hub's clock, in Unix seconds, until which a download may begin.
    """

    server: str
    seeder: str
    sha256: str
    nonce: str
    expires_at_seconds: int

    def signed(self, key: SigningKey) -> str:
        """Sign the ticket with the hub's ledger key, and return it as JSON."""
        return json.dumps(
            {"ticket": asdict(self), "signature": key.sign(self._claim()).hex()}, sort_keys=True
        )

    def _claim(self) -> dict[str, Any]:
        return {FORMAT: asdict(self)}

    @classmethod
    def verified(cls, text: str, key: bytes, server: str, seeder: str, now: float) -> SeedTicket:
        """Parse and verify a signed ticket.

        Args:
            text: JSON, as returned by ``signed``.
            key: The hub's 32-byte ledger key.
            server: Id of the hub that must have issued the ticket.
            seeder: Fingerprint of the TLS key that the ticket must contain.
            now: The hub's time in Unix seconds.

        Raises:
            GymError: ``PERMISSION_DENIED``, without a reason, if the ticket is not valid for this hub, seeder and time.
        """
        refusal = GymError(ErrorCode.PERMISSION_DENIED, "no valid ticket", "request one from the hub")
        try:
            if len(text) > MAX_TICKET_CHARS:
                raise refusal
            document = json.loads(text)
            ticket = cls(**document["ticket"])
            signature = bytes.fromhex(document["signature"])
            if type(ticket.expires_at_seconds) is not int or not _SHA256.fullmatch(ticket.sha256):
                raise refusal
            verify_signature(key, ticket._claim(), signature)
        except (ValueError, KeyError, TypeError, RecursionError, GymError) as error:
            raise refusal from error
        if (ticket.server, ticket.seeder) != (server, seeder) or now > ticket.expires_at_seconds:
            raise refusal
        return ticket
