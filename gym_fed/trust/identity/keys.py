"""Ed25519 keys that sign updates and ledgers, and their PEM files, which may be encrypted with a passphrase.

An encrypted private key is PKCS#8 with PBES2, scrypt and AES-256-CBC (RFC 5958, RFC 8018, RFC 7914). ``cryptography``
reads this format, but writes only PBKDF2 with 2048 rounds, for which a GPU tests millions of guesses per second. This
module therefore writes the envelope itself, with scrypt at N = 2^17, r = 8, p = 1 (OWASP's first choice: 128 MiB and
half a second per guess). `load_pem_private_key` can read it; the openssl command rejects it because of its default
memory limit.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt
from cryptography.hazmat.primitives.padding import PKCS7
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.core.json_files import canonical_json

PUBLIC_KEY_BYTES = 32

Passphrase = Callable[[str], bytes]
"""Returns the passphrase for the file with the given name."""


CONTRIBUTOR_PATTERN = r"c[0-9a-f]{32}"
"""Regular expression for an account id."""


def contributor_id(public_key: bytes) -> str:
    """Return the id of an account: ``c`` and the first 32 hex digits (128 bits) of the SHA-256 of its first key."""
    return "c" + hashlib.sha256(public_key).hexdigest()[:32]


def server_id(ledger_public_key: bytes) -> str:
    """Return the id of a hub: ``s`` and the first 16 hex digits of the SHA-256 of its ledger key."""
    return "s" + hashlib.sha256(ledger_public_key).hexdigest()[:16]


class SigningKey:
    """An Ed25519 private key that signs canonical JSON for an account.

    Args:
        key: The private key.
        account: Id of the account; if empty, the account with this key as its first key.
    """

    def __init__(self, key: Ed25519PrivateKey, account: str = "") -> None:
        self._key = key
        self._account = account

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path, passphrase: Passphrase | None = None) -> SigningKey:
        """Read a key from a PEM file.

        Args:
            path: Path of the file.
            passphrase: Called with the file's name if the file is encrypted; returns its passphrase.

        Raises:
            GymError: ``FILE_NOT_FOUND``; ``STATE_CORRUPT`` if the file does not contain an Ed25519 key; ``KEY_LOCKED``
                if the passphrase is missing or wrong.
        """
        try:
            pem = path.read_bytes()
        except FileNotFoundError as error:
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"no key at {path}") from error
        return cls(read_private_key(pem, str(path), passphrase))

    def save(self, path: Path, passphrase: bytes | None = None) -> None:
        """Write the key with mode 0600, encrypted if a passphrase is given. An existing file is never overwritten."""
        if path.exists():
            raise GymError(ErrorCode.FILE_EXISTS, f"{path} exists; a key is never overwritten")
        write_atomically(path, self.to_pem(passphrase), mode=0o600)

    def to_pem(self, passphrase: bytes | None = None) -> bytes:
        """Serialise the key as PKCS#8 PEM."""
        return plain_pem(self._key) if passphrase is None else encrypted_pem(self._key, passphrase)

    @property
    def public_key(self) -> bytes:
        """The 32-byte public key."""
        return self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @property
    def contributor(self) -> str:
        """The id of the account for which the key signs."""
        return self._account or contributor_id(self.public_key)

    def of_account(self, contributor: str) -> SigningKey:
        """Return a copy that signs for an account whose first key was a different one."""
        return SigningKey(self._key, contributor)

    def sign(self, value: object) -> bytes:
        """Return the 64-byte signature of ``canonical_json(value)``."""
        return self._key.sign(canonical_json(value))


def verify_signature(public_key: bytes, value: object, signature: bytes) -> None:
    """Verify a signature of ``canonical_json(value)``.

    Raises:
        GymError: ``SIGNATURE_INVALID`` if the key or the signature is invalid.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, canonical_json(value))
    except (InvalidSignature, ValueError) as error:
        raise GymError(
            ErrorCode.SIGNATURE_INVALID, f"the signature is not by the key of {contributor_id(public_key)}"
        ) from error


def load_or_create(path: Path, passphrase: Passphrase | None = None) -> SigningKey:
    """Load the key at ``path``, or generate it on first use."""
    if not path.exists():
        make_folder(path.parent)
        os.chmod(path.parent, 0o700)
        SigningKey.generate().save(path)
    return SigningKey.load(path, passphrase)


def read_private_key(pem: bytes, what: str, passphrase: Passphrase | None) -> Ed25519PrivateKey:
    """Read an Ed25519 private key from PEM; raises the same errors as ``SigningKey.load``."""
    secret: bytes | None = None
    if is_encrypted(pem):
        if passphrase is None:
            raise GymError(ErrorCode.KEY_LOCKED, f"{what} is encrypted, but no passphrase was given")
        secret = passphrase(what)
    try:
        key = load_pem_private_key(pem, password=secret)
    except (ValueError, TypeError) as error:
        if secret is not None and "password" in str(error).lower():
            raise GymError(
                ErrorCode.KEY_LOCKED, f"the passphrase does not decrypt {what}", "try again"
            ) from error
        raise GymError(ErrorCode.STATE_CORRUPT, f"{what} is not a readable private key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise GymError(ErrorCode.STATE_CORRUPT, f"{what} is not an Ed25519 key")
    return key


SCRYPT_N, SCRYPT_R, SCRYPT_P = 1 << 17, 8, 1
KEY_DERIVATION = f"scrypt N={SCRYPT_N} r={SCRYPT_R} p={SCRYPT_P}, AES-256-CBC"
_PBES2 = bytes.fromhex("06092a864886f70d01050d")
_SCRYPT = bytes.fromhex("06092b06010401da47040b")
_AES_256_CBC = bytes.fromhex("060960864801650304012a")
_HEADER = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"


def is_encrypted(pem: bytes) -> bool:
    """Return True if a PEM file contains an encrypted key."""
    return _HEADER in pem


def plain_pem(key: PrivateKeyTypes) -> bytes:
    """Serialise a key as unencrypted PKCS#8."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def encrypted_pem(key: PrivateKeyTypes, passphrase: bytes) -> bytes:
    """Serialise a key as encrypted PKCS#8, with a fresh salt and initialisation vector."""
    salt, iv = secrets.token_bytes(16), secrets.token_bytes(16)
    secret = Scrypt(salt=salt, length=32, n=SCRYPT_N, r=SCRYPT_R, p=SCRYPT_P).derive(passphrase)
    padder = PKCS7(128).padder()
    inner = key.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
    encryptor = Cipher(algorithms.AES(secret), modes.CBC(iv)).encryptor()
    ciphertext = encryptor.update(padder.update(inner) + padder.finalize()) + encryptor.finalize()
    numbers = b"".join(_integer(n) for n in (SCRYPT_N, SCRYPT_R, SCRYPT_P))
    derivation = _sequence(_SCRYPT, _sequence(_octets(salt), numbers))
    cipher = _sequence(_AES_256_CBC, _octets(iv))
    der = _sequence(_sequence(_PBES2, _sequence(derivation, cipher)), _octets(ciphertext))
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
