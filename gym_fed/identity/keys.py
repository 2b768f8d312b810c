"""Ed25519 keys: who signs an update, who signs the ledger.

Private keys live in files of mode 0600 as unencrypted PKCS#8 PEM. A public key is 32 raw bytes; its hex sha256
prefix is the contributor's id, so an id can be checked against the key without asking anybody.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from gym_fed.errors import ErrorCode, GymError
from gym_fed.files import write_atomically
from gym_fed.identity.canonical import canonical_json

PUBLIC_KEY_BYTES = 32


def contributor_id(public_key: bytes) -> str:
    """The id of an account: ``c`` and the first 16 hex digits of the key's sha256."""
    return "c" + hashlib.sha256(public_key).hexdigest()[:16]


def server_id(ledger_public_key: bytes) -> str:
    """The id of a hub: ``s`` and the first 16 hex digits of its ledger key's sha256."""
    return "s" + hashlib.sha256(ledger_public_key).hexdigest()[:16]


class SigningKey:
    """A private key that signs canonical JSON."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """Read a PEM file.

        Raises:
            GymError: ``FILE_NOT_FOUND``; ``STATE_CORRUPT`` when it holds no Ed25519 key.
        """
        try:
            key = load_pem_private_key(path.read_bytes(), password=None)
        except FileNotFoundError as error:
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"no key at {path}") from error
        except (ValueError, TypeError) as error:
            raise GymError(ErrorCode.STATE_CORRUPT, f"{path} is not a readable private key") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise GymError(ErrorCode.STATE_CORRUPT, f"{path} is not an Ed25519 key")
        return cls(key)

    def save(self, path: Path) -> None:
        """Write the key with mode 0600; never over an existing one."""
        if path.exists():
            raise GymError(ErrorCode.FILE_EXISTS, f"{path} exists; a key is never overwritten")
        pem = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        write_atomically(path, pem, mode=0o600)

    @property
    def public_key(self) -> bytes:
        """32 raw bytes."""
        return self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @property
    def contributor(self) -> str:
        return contributor_id(self.public_key)

    def sign(self, value: object) -> bytes:
        """64-byte signature over ``canonical_json(value)``."""
        return self._key.sign(canonical_json(value))


def verify_signature(public_key: bytes, value: object, signature: bytes) -> None:
    """Check a signature over ``canonical_json(value)``.

    Raises:
        GymError: ``SIGNATURE_INVALID`` when the key or the signature is not right.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, canonical_json(value))
    except (InvalidSignature, ValueError) as error:
        raise GymError(
            ErrorCode.SIGNATURE_INVALID, f"the signature is not by the key of {contributor_id(public_key)}"
        ) from error


def load_or_create(path: Path) -> SigningKey:
    """The key at ``path``, generated on first use."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        os.chmod(path.parent, 0o700)
        SigningKey.generate().save(path)
    return SigningKey.load(path)
