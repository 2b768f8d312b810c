"""Establish trust in hubs: a hub is identified by the fingerprint of its key, not by its address."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from gym_client.identity.address import Address
from gym_client.identity.home import Home
from gym_client.identity.pins import ServerPin, pin_path, pin_with_key
from gym_client.identity.proxy import connect
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.text import plain
from gym_fed.trust.identity.tls import fingerprint, trusting_context, validity

_FETCH_SECONDS = 10.0

Confirm = Callable[[str], bool]
"""Displays a fingerprint and returns the user's answer."""


def fetch_certificate(address: Address) -> bytes:
    """Fetch the certificate served at an address, as unverified PEM.

    Raises:
        GymError: ``UNAVAILABLE`` if there is no answer, or the answer is not TLS.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = (
        False,
        ssl.CERT_NONE,
    )  # the key is compared with the pin; no CA is needed
    try:
        with (
            connect(address, _FETCH_SECONDS) as stream,
            context.wrap_socket(stream, server_hostname=address.host) as secure,
        ):
            der = secure.getpeercert(True)
    except ssl.SSLError as error:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"{address} answers, but not with TLS: {error.reason or error}",
            "check the port; a server without TLS needs --insecure, on loopback only",
        ) from error
    except OSError as error:
        raise GymError(
            ErrorCode.UNAVAILABLE,
            f"cannot reach {address}: {error.strerror or error}",
            "check the address, and that the server is running",
        ) from error
    if der is None:
        raise GymError(
            ErrorCode.UNAVAILABLE, f"{address} presents no certificate", "check that it is a gym-server"
        )
    return ssl.DER_cert_to_PEM_cert(der).encode("ascii")


def vouching_authority(address: Address, found: str) -> str:
    """Return the name of the trusted CA that certifies a hub's key for its address; empty if there is none.

    Args:
        address: Address of the hub.
        found: Fingerprint of the key that the hub presented before.
    """
    context = trusting_context()
    try:
        with (
            connect(address, _FETCH_SECONDS) as plain_socket,
            context.wrap_socket(plain_socket, server_hostname=address.host) as secure,
        ):
            der = secure.getpeercert(True)
            issuer: Any = (secure.getpeercert() or {}).get("issuer", ())
    except (OSError, GymError):  # includes SSLError, since most hubs have self-signed certificates
        return ""
    if der is None or fingerprint(ssl.DER_cert_to_PEM_cert(der).encode("ascii")) != found:
        return ""
    names = dict(pair for part in issuer for pair in part)
    return plain(str(names.get("organizationName") or names.get("commonName") or "an authority"), 80)


def establish(
    home: Home, address: Address, expected: str | None, confirm: Confirm, insecure: bool = False
) -> ServerPin:
    """Decide whether to trust the hub at an address, and pin it.

    Args:
        home: The home with the pins.
        address: Address of the hub.
        expected: Fingerprint from an invite or ``--fingerprint``; None to use the pin or ask the user.
        confirm: Called at first contact, unless the key is confirmed in another way, such as by the pin of another
            address.
        insecure: Use plain text.

    Raises:
        GymError: ``SERVER_KEY_CHANGED`` if the key is not the pinned or expected one; ``PERMISSION_DENIED`` if the user
            declines; ``USAGE`` for plain text to an address other than loopback; ``UNAVAILABLE``.
    """
    pin = ServerPin.load(home, address)
    if insecure:
        return _plain(home, address, pin)
    if pin is not None and not pin.fingerprint:
        pin = None  # the first contact was in plain text, so no key is verified yet
    try:
        pem = fetch_certificate(address)
    except GymError:
        if pin is None or (expected is not None and expected != pin.fingerprint):
            raise
        return pin  # the hub is down; the channel waits for the pinned key
    presented = fingerprint(pem)
    check_fingerprint(home, address, presented, pin.fingerprint if pin else None)
    check_dates(address, pem)
    if expected is not None and presented != expected:
        raise GymError(
            ErrorCode.SERVER_KEY_CHANGED,
            f"{address} has the key {presented}, not {expected}",
            "this is not the server whose fingerprint you have; ask its coordinator for the fingerprint",
        )
    known = pin or pin_with_key(home, presented)
    if known is None:
        if expected is None and not confirm(presented):
            raise GymError(ErrorCode.PERMISSION_DENIED, f"the key of {address} was not accepted")
        known = ServerPin(address=str(address), fingerprint=presented, certificate_pem="")
    known = known.but(
        address=str(address)
    )  # the key identifies the hub, so the account is the same at another address
    return _saved(home, address, known.but(certificate_pem=pem.decode("ascii")), pin)


def check_dates(address: Address, pem: bytes) -> None:
    """Raise ``CLOCK_SKEWED`` for a certificate that gRPC would refuse because of this machine's clock.

    A hub's self-signed certificate never expires, but a certificate from a CA does.
    """
    begin, end = validity(pem)
    now = datetime.now(UTC)
    text = f"this machine's clock shows {now:%Y-%m-%d %H:%M UTC}, and the certificate of {address}"
    if now < begin:
        raise GymError(
            ErrorCode.CLOCK_SKEWED,
            f"{text} is valid from {begin:%Y-%m-%d %H:%M UTC}",
            "this machine's clock is behind: set it",
        )
    if now > end:
        raise GymError(
            ErrorCode.CLOCK_SKEWED,
            f"{text} expired on {end:%Y-%m-%d %H:%M UTC}",
            "set this machine's clock if it is ahead; otherwise the coordinator must renew the certificate",
        )


def check_fingerprint(home: Home, address: Address, found: str, pinned: str | None) -> None:
    """Raise ``SERVER_KEY_CHANGED`` if a hub presents a different key than the pinned one."""
    if pinned is not None and found != pinned:
        raise GymError(
            ErrorCode.SERVER_KEY_CHANGED,
            f"the key of {address} changed: pinned {pinned}, found {found}",
            "somebody may be intercepting the connection. If the coordinator confirms the new fingerprint, delete "
            f"{pin_path(home, address)} and join again",
        )


def _plain(home: Home, address: Address, pin: ServerPin | None) -> ServerPin:
    if not address.is_loopback:
        raise GymError(
            ErrorCode.USAGE,
            f"--insecure is for loopback only, but {address} is not loopback",
            "omit --insecure; the server speaks TLS by default",
        )
    fresh = ServerPin(address=str(address), fingerprint="", certificate_pem="")
    return _saved(home, address, pin if pin is not None and not pin.fingerprint else fresh, pin)


def _saved(home: Home, address: Address, pin: ServerPin, before: ServerPin | None) -> ServerPin:
    if pin != before:
        pin.save(home, address)
    return pin
