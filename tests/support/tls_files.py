"""A certificate of this machine, and its key, as files."""

from __future__ import annotations

import datetime
import ipaddress
import socket
import ssl
import tempfile
import threading
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat

from gym_fed.trust.identity.keys import plain_pem
from gym_fed.trust.identity.tls import TLS_NAME, self_signed


def write_tls_files(
    folder: Path, *, begins: int = -1, ends: int = 1, passphrase: bytes | None = None
) -> tuple[Path, Path]:
    """Write ``certificate.pem`` and ``key.pem``; the certificate holds from so many days from now, to so many."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    hosts = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + datetime.timedelta(days=begins))
        .not_valid_after(now + datetime.timedelta(days=ends))
        .add_extension(hosts, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(parents=True, exist_ok=True)
    under = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    paths = folder / "certificate.pem", folder / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(Encoding.PEM))
    paths[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, under))
    return paths


@cache
def seeder_certificate(number: int = 0) -> str:
    """A certificate as seeders have it, the same one for the same number."""
    return self_signed(plain_pem(ec.generate_private_key(ec.SECP256R1()))).decode()


def signed_by(authority: ec.EllipticCurvePrivateKey, key: ec.EllipticCurvePrivateKey) -> bytes:
    """A PEM certificate of a key, signed by an authority whose own certificate is ``self_signed``."""
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, TLS_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "third party")]))
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(TLS_NAME)]), critical=False)
        .sign(authority, hashes.SHA256())
    )
    return certificate.public_bytes(Encoding.PEM)


class RawTlsServer:
    """A TLS server on loopback that shows a certificate to one caller."""

    def __init__(self, certificate_pem: bytes, key_pem: bytes) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        with tempfile.TemporaryDirectory() as folder:
            paths = Path(folder) / "certificate.pem", Path(folder) / "key.pem"
            for path, pem in zip(paths, (certificate_pem, key_pem), strict=True):
                path.write_bytes(pem)
            context.load_cert_chain(*paths)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._context = context
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            with self._context.wrap_socket(self._listener.accept()[0], server_side=True) as connection:
                connection.recv(1)
        except OSError:
            pass

    def close(self) -> None:
        self._listener.close()
        self._thread.join()
