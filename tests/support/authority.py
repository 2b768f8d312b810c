"""A certificate authority of the tests' own, which signs what a hub requests."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

NAME = "Testing Authority"


class Authority:
    """Signs requests; ``root`` is the file that those who trust it have."""

    def __init__(self, folder: Path) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, NAME)])
        self.root = folder / "authority.pem"
        ca = x509.BasicConstraints(ca=True, path_length=None)
        made = (
            self._builder(self._name, 365).public_key(self._key.public_key()).add_extension(ca, critical=True)
        )
        self.root.write_bytes(made.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def sign(self, request_pem: bytes, days: int = 90) -> bytes:
        """The chain, PEM: what was requested, for so many days from yesterday, and the root."""
        request = x509.load_pem_x509_csr(request_pem)
        assert request.is_signature_valid
        builder = self._builder(request.subject, days).public_key(request.public_key())
        for one in request.extensions:
            builder = builder.add_extension(one.value, critical=one.critical)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM) + self.root.read_bytes()

    def _builder(self, subject: x509.Name, days: int) -> x509.CertificateBuilder:
        begin = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + datetime.timedelta(days=days))
        )
