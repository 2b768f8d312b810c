"""The hub's TLS certificate: self-signed or issued by an authority, always for the hub's own TLS key."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.trust.identity.keys import Passphrase
from gym_fed.trust.identity.tls import (
    certificate_host,
    certificate_request,
    certificates_in,
    fingerprint,
    key_fingerprint,
    private_pem,
    read_certificate,
    self_signed,
    validity,
)

_KEY, _CERTIFICATE = "tls.key", "tls.crt"
_MAX_CHAIN_BYTES = 1 << 20
_SOON_DAYS = 14
"""Number of days before a certificate expires from which the hub warns at start."""


def served_pair(folder: Path, passphrase: Passphrase) -> tuple[bytes, bytes]:
    """Return a hub's private key and certificate chain, in the form that TLS requires.

    Raises:
        GymError: ``CONFIG_INVALID`` for a certificate that contributors would refuse, with a hint; ``KEY_LOCKED``.
    """
    keys = folder / "keys"
    key, chain = private_pem(keys / _KEY, passphrase), (keys / _CERTIFICATE).read_bytes()
    _require_usable(key, chain, keys / _CERTIFICATE, f"gym-server certificate create --dir {folder}")
    return key, chain


def note_on_certificate(folder: Path) -> str:
    """Return a warning if the certificate expires soon; empty otherwise."""
    end = validity((folder / "keys" / _CERTIFICATE).read_bytes())[1]
    if end - datetime.datetime.now(datetime.UTC) > datetime.timedelta(days=_SOON_DAYS):
        return ""
    return f"the certificate expires on {end:%Y-%m-%d}; after that, nobody can connect (see gym-server certificate)"


def describe(folder: Path) -> dict[str, Any]:
    """Return the fingerprint, host, issuer and expiry of the certificate."""
    pem = (folder / "keys" / _CERTIFICATE).read_bytes()
    certificate = read_certificate(pem)
    own = certificate.issuer == certificate.subject
    return {
        "fingerprint": fingerprint(pem),
        "host": None if own else certificate_host(pem),
        "issuer": None if own else certificate.issuer.rfc4514_string(),
        "valid_until": f"{validity(pem)[1]:%Y-%m-%d %H:%M UTC}",
    }


def request(folder: Path, host: str, passphrase: Passphrase) -> bytes:
    """Return a certificate signing request in PEM format.

    Raises:
        GymError: ``USAGE`` for a host name that is not valid in a certificate.
    """
    return certificate_request(private_pem(folder / "keys" / _KEY, passphrase), host)


def add(folder: Path, file: Path, passphrase: Passphrase) -> None:
    """Install an authority's certificate chain after checking that it is for the hub's own key.

    Only certificates are copied. A private key in the same file, which some tools write, is left out.

    Raises:
        GymError: ``CONFIG_INVALID`` if the certificate is for a different key, has expired or is missing;
            ``FILE_NOT_FOUND``.
    """
    try:
        with file.open("rb") as stream:
            found = stream.read(_MAX_CHAIN_BYTES + 1)
    except OSError as error:
        raise GymError(ErrorCode.FILE_NOT_FOUND, f"{file}: {error.strerror or error}") from error
    hint = f"have the authority sign the output of gym-server certificate request --dir {folder}"
    if len(found) > _MAX_CHAIN_BYTES:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file} is larger than {_MAX_CHAIN_BYTES} bytes", hint)
    try:
        chain = certificates_in(found)
    except GymError as error:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file}: {error.message}", hint) from error
    _require_usable(private_pem(folder / "keys" / _KEY, passphrase), chain, file, hint)
    write_atomically(folder / "keys" / _CERTIFICATE, chain)


def create(folder: Path, passphrase: Passphrase) -> None:
    """Write a self-signed certificate for the hub's key; it never expires."""
    key = private_pem(folder / "keys" / _KEY, passphrase)
    write_atomically(folder / "keys" / _CERTIFICATE, self_signed(key))


def _require_usable(key: bytes, chain: bytes, file: Path, hint: str) -> None:
    try:
        found, (begin, end) = fingerprint(chain), validity(chain)
    except GymError as error:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file}: {error.message}", hint) from error
    if found != (own := key_fingerprint(key)):
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{file} is a certificate for the key {found}, but contributors know this hub by the key {own}",
            hint,
        )
    now = datetime.datetime.now(datetime.UTC)
    if end < now:
        raise GymError(ErrorCode.CONFIG_INVALID, f"{file} expired on {end:%Y-%m-%d %H:%M UTC}", hint)
    if begin > now:
        raise GymError(
            ErrorCode.CONFIG_INVALID,
            f"{file} is valid from {begin:%Y-%m-%d %H:%M UTC}, but this machine's clock shows "
            f"{now:%Y-%m-%d %H:%M UTC}",
            "set this machine's clock, or wait",
        )
