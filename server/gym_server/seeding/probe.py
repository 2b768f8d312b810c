"""Connect to a prospective seeder to check that it is reachable and holds its key."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

from gym_fed.core.errors import GymError
from gym_fed.trust.identity.tls import certificate_host, fingerprint

Probe = Callable[[str, int, str], Awaitable[bool]]
"""Function of host, port and certificate; returns True if a server with the certificate's key listens there."""

_SECONDS = 5.0


async def probe_seeder(host: str, port: int, certificate_pem: str) -> bool:
    """Return True if a TLS server with the certificate's key listens at an address.

    Only the owner of the key can pass this check, so nobody can announce a third party's address.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=certificate_pem)
        context.set_alpn_protocols(["h2"])
        announced = fingerprint(certificate_pem.encode())
        name = certificate_host(certificate_pem.encode())
        async with asyncio.timeout(_SECONDS):
            _, writer = await asyncio.open_connection(host, port, ssl=context, server_hostname=name)
    except (OSError, TimeoutError, ValueError, GymError):  # ssl.SSLError is an OSError
        return False
    try:
        # If the announced certificate is a CA, certificates that it issued are trusted too, so compare the key itself.
        shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        return fingerprint(ssl.DER_cert_to_PEM_cert(shown).encode()) == announced
    finally:
        writer.close()
