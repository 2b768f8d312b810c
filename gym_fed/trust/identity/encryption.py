"""A private key under a passphrase: PKCS#8 with PBES2, scrypt and AES-256-CBC (RFC 5958, RFC 8018, RFC 7914).

``cryptography`` reads this form but writes only PBKDF2 with 2048 rounds, which a graphics card tries millions of times
a second; so the envelope is written here, with scrypt at N = 2^17, r = 8, p = 1 (OWASP's first choice: 128 MiB and half
a second a guess). `load_pem_private_key` reads it back; the openssl command refuses to, by its default memory limit.
"""

from __future__ import annotations

import base64
import secrets

from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from cryptography.hazmat.primitives.padding import PKCS7
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

SCRYPT_N, SCRYPT_R, SCRYPT_P = 1 << 17, 8, 1
KEY_DERIVATION = f"scrypt N={SCRYPT_N} r={SCRYPT_R} p={SCRYPT_P}, AES-256-CBC"
_PBES2 = bytes.fromhex("06092a864886f70d01050d")
_SCRYPT = bytes.fromhex("06092b06010401da47040b")
_AES_256_CBC = bytes.fromhex("060960864801650304012a")
_HEADER = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"


def is_encrypted(pem: bytes) -> bool:
    """Whether a PEM file holds a key under a passphrase."""
    return _HEADER in pem


def plain_pem(key: PrivateKeyTypes) -> bytes:
    """Unencrypted PKCS#8."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def encrypted_pem(key: PrivateKeyTypes, passphrase: bytes) -> bytes:
    """PKCS#8 under a passphrase, with fresh salt and initialisation vector."""
    salt, iv = secrets.token_bytes(16), secrets.token_bytes(16)
    secret = Scrypt(salt=salt, length=32, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P).derive(passphrase)
    padder = PKCS7(128).padder()
    inner = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    encryptor = Cipher(algorithms.AES(secret), modes.CBC(iv)).encryptor()
    hidden = encryptor.update(padder.update(inner) + padder.finalize()) + encryptor.finalize()
    numbers = b"".join(_integer(n) for n in (SCRYPT_N, SCRYPT_R, SCRYPT_P))
    derivation = _sequence(_SCRYPT, _sequence(_octets(salt), numbers))
    cipher = _sequence(_AES_256_CBC, _octets(iv))
    der = _sequence(_sequence(_PBES2, _sequence(derivation, cipher)), _octets(hidden))
    body = base64.b64encode(der)
    lines = [body[start : start + 64] for start in range(0, len(body), 64)]
    return b"\n".join([_HEADER, *lines, b"-----END ENCRYPTED PRIVATE KEY-----", b""])


def _tagged(tag: int, content: bytes) -> bytes:
    size = len(content)
    if size < 0x80:
        return bytes((tag, size)) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes((tag, 0x80 | len(length))) + length + content


def _sequence(*parts: bytes) -> bytes:
    return _tagged(0x30, b"".join(parts))


def _octets(content: bytes) -> bytes:
    return _tagged(0x04, content)


def _integer(value: int) -> bytes:
    return _tagged(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))
