"""The hub's TLS certificate, and the fingerprint by which contributors know it.

The certificate is self-signed and names no host: a contributor trusts the hub's *key*, not its address. The
fingerprint is sha256 over the DER SubjectPublicKeyInfo, so that a renewed certificate of the same key keeps it.
"""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from gym_fed.errors import ErrorCode, GymError
from gym_fed.files import write_atomically

TLS_NAME = "gym-fed-hub"  # the name in every hub's certificate; clients override the target name with it
_VALID_DAYS = 3650


def create_certificate(key_path: Path, certificate_path: Path) -> str:
    """Write a P-256 key (mode 0600) and its certificate; returns the fingerprint."""
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
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_atomically(key_path, pem, mode=0o600)
    certificate_pem = certificate.public_bytes(Encoding.PEM)
    write_atomically(certificate_path, certificate_pem)
    return fingerprint(certificate_pem)


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
