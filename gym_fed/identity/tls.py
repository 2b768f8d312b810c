"""The hub's TLS certificate, and the fingerprint by which contributors know it.

The certificate is self-signed and names no host: a contributor trusts the hub's *key*, not its address. The
fingerprint is sha256 over the DER SubjectPublicKeyInfo, so that a renewed certificate of the same key keeps it.
"""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from gym_fed.errors import ErrorCode, GymError
from gym_fed.files import write_atomically
from gym_fed.identity.encryption import encrypted_pem, is_encrypted, plain_pem
from gym_fed.identity.keys import Passphrase

TLS_NAME = "gym-fed-hub"  # the name in every hub's certificate; clients override the target name with it
_VALID_DAYS = 3650


def create_certificate(key_path: Path, certificate_path: Path, passphrase: bytes | None = None) -> str:
    """Write a P-256 key (mode 0600, under a passphrase if given) and its certificate; returns the fingerprint."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, TLS_NAME)])
    today = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=_VALID_DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = plain_pem(key) if passphrase is None else encrypted_pem(key, passphrase)
    write_atomically(key_path, pem, mode=0o600)
    certificate_pem = certificate.public_bytes(Encoding.PEM)
    write_atomically(certificate_path, certificate_pem)
    return fingerprint(certificate_pem)


def private_pem(path: Path, passphrase: Passphrase) -> bytes:
    """A private key as TLS takes it, unencrypted; only ever in memory.

    Raises:
        GymError: ``KEY_LOCKED`` when the passphrase does not open it.
    """
    pem = path.read_bytes()
    if not is_encrypted(pem):
        return pem
    try:
        return plain_pem(serialization.load_pem_private_key(pem, passphrase(str(path))))
    except (ValueError, TypeError) as error:
        raise GymError(ErrorCode.KEY_LOCKED, f"the passphrase does not open {path}", "try again") from error


def fingerprint(certificate_pem: bytes) -> str:
    """``sha256:`` and 64 hex digits over the certificate's public key.

    Raises:
        GymError: ``STATE_CORRUPT`` when the bytes are no certificate.
    """
    try:
        certificate = x509.load_pem_x509_certificate(certificate_pem)
    except ValueError as error:
        raise GymError(ErrorCode.STATE_CORRUPT, "not a PEM certificate") from error
    spki = certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return "sha256:" + hashlib.sha256(spki).hexdigest()
