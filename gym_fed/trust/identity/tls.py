"""TLS certificates of hubs, and the key fingerprints that contributors pin.

A contributor trusts the hub's *key*, not its address. The fingerprint is the SHA-256 of the DER SubjectPublicKeyInfo,
so it does not change if the certificate is renewed, or signed by a CA, with the same key. The hub's own certificate is
self-signed and does not contain its host name.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
import re
import secrets
import ssl
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.core.text import plain
from gym_fed.trust.identity.keys import Passphrase, encrypted_pem, is_encrypted, plain_pem

TLS_NAME = "gym-fed-hub"  # the name in all hub certificates; clients use it as target name override
_FIRST_DATE = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_NO_END = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""The date that means "no expiry" in RFC 5280 (section 4.1.2.5)."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,250}[A-Za-z0-9])?", re.ASCII)


def create_certificate(key_path: Path, certificate_path: Path, passphrase: bytes | None = None) -> str:
    """Write a P-256 key (mode 0600, encrypted if a passphrase is given) and its certificate; return the fingerprint."""
    key = ec.generate_private_key(ec.SECP256R1())
    pem = plain_pem(key) if passphrase is None else encrypted_pem(key, passphrase)
    write_atomically(key_path, pem, mode=0o600)
    certificate_pem = self_signed(plain_pem(key))
    write_atomically(certificate_path, certificate_pem)
    return fingerprint(certificate_pem)


def self_signed(key_pem: bytes) -> bytes:
    """Create a self-signed PEM certificate for a hub's key, with the name that all hubs share.

    It never expires, since contributors trust the pinned key, and dates would only break clients with wrong clocks.
    """
    key = _signing_key(key_pem)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, TLS_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_FIRST_DATE)
        .not_valid_after(_NO_END)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM)


def certificate_request(key_pem: bytes, host: str) -> bytes:
    """Create a PEM-encoded PKCS #10 certificate request (RFC 2986) for the hub's key and a host.

    Args:
        key_pem: The hub's private key, unencrypted.
        host: Host name or IP address, without a port.

    Raises:
        GymError: ``USAGE`` if a certificate cannot contain the host.
    """
    try:
        name: x509.GeneralName = x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        if not _HOST.fullmatch(host):
            raise GymError(
                ErrorCode.USAGE,
                f"{plain(host, 80)!r} is not a host name",
                "use a name such as hub.example.org, without a port",
            ) from None
        name = x509.DNSName(host)
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    request = request.add_extension(x509.SubjectAlternativeName([name]), critical=True)
    return request.sign(_signing_key(key_pem), hashes.SHA256()).public_bytes(Encoding.PEM)


def certificate_host(certificate_pem: bytes) -> str:
    """Return the first host name in a certificate, which clients that pin the key use as target name override.

    Raises:
        GymError: ``STATE_CORRUPT`` if the bytes are not a certificate.
    """
    try:
        names = read_certificate(certificate_pem).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )
    except x509.ExtensionNotFound:
        return TLS_NAME
    except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
        raise GymError(ErrorCode.STATE_CORRUPT, f"a certificate that cannot be read: {error}") from error
    for name in names.value.get_values_for_type(x509.DNSName):
        return name.replace("*", TLS_NAME, 1)
    return next((str(address) for address in names.value.get_values_for_type(x509.IPAddress)), TLS_NAME)


def validity(certificate_pem: bytes) -> tuple[datetime.datetime, datetime.datetime]:
    """Return the start and end of a certificate's validity.

    Raises:
        GymError: ``STATE_CORRUPT`` if the bytes are not a certificate.
    """
    certificate = read_certificate(certificate_pem)
    return certificate.not_valid_before_utc, certificate.not_valid_after_utc


def certificates_in(pem: bytes) -> bytes:
    """Return the certificates in a PEM file in order, without other content such as a private key.

    Raises:
        GymError: ``STATE_CORRUPT`` if the file contains no certificate.
    """
    try:
        certificates = x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise GymError(ErrorCode.STATE_CORRUPT, "not a PEM certificate") from error
    return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)


def trusting_context() -> ssl.SSLContext:
    """Create a client TLS context that trusts this machine's CAs, with the same rules on every Python version.

    Since Python 3.13, the default context rejects CA certificates without some extensions that RFC 5280 requires
    (``VERIFY_X509_STRICT``). Corporate CAs often lack these extensions, and other programs, including gRPC, accept
    them.
    """
    context = ssl.create_default_context()
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def read_certificate(certificate_pem: bytes) -> x509.Certificate:
    """Parse the first certificate in a PEM file; in a chain, this is the server's own.

    Raises:
        GymError: ``STATE_CORRUPT`` if the bytes are not a certificate.
    """
    try:
        return x509.load_pem_x509_certificate(certificate_pem)
    except ValueError as error:
        raise GymError(ErrorCode.STATE_CORRUPT, "not a PEM certificate") from error


def private_pem(path: Path, passphrase: Passphrase) -> bytes:
    """Read and decrypt a private key for TLS; the decrypted key exists only in memory.

    Raises:
        GymError: ``KEY_LOCKED`` if the passphrase is wrong.
    """
    pem = path.read_bytes()
    if not is_encrypted(pem):
        return pem
    try:
        return plain_pem(serialization.load_pem_private_key(pem, passphrase(str(path))))
    except (ValueError, TypeError) as error:
        raise GymError(
            ErrorCode.KEY_LOCKED, f"the passphrase does not decrypt {path}", "try again"
        ) from error


def server_context(certificate: Path, key_pem: bytes) -> ssl.SSLContext:
    """Create the TLS context of a server, given its unencrypted private key in memory.

    ``ssl`` can only read keys from files. OpenSSL refuses the project's encrypted keys, since their scrypt needs 128
    MiB and OpenSSL's limit is 32. The key is therefore written to a temporary file, encrypted with a random password.
    """
    key, password = serialization.load_pem_private_key(key_pem, None), secrets.token_hex(32)
    hidden = serialization.BestAvailableEncryption(password.encode())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "key.pem")
        path.write_bytes(key.private_bytes(Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden))
        context.load_cert_chain(certificate, path, password)
    return context


def fingerprint(certificate_pem: bytes) -> str:
    """Return the fingerprint of a certificate's public key: ``sha256:`` and 64 hex digits.

    Raises:
        GymError: ``STATE_CORRUPT`` if the bytes are not a certificate.
    """
    return _fingerprint(read_certificate(certificate_pem).public_key())


def key_fingerprint(key_pem: bytes) -> str:
    """Return the fingerprint of an unencrypted private key."""
    return _fingerprint(_signing_key(key_pem).public_key())


def _fingerprint(key: CertificatePublicKeyTypes) -> str:
    spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return "sha256:" + hashlib.sha256(spki).hexdigest()


def _signing_key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise GymError(
            ErrorCode.STATE_CORRUPT, "a hub's TLS key must be an elliptic-curve key, but this is not"
        )
    return key
