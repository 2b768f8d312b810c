"""Ed25519 keys: who signs an update, who signs the ledger.

Private keys live in files of mode 0600 as PKCS#8 PEM, plain or under a passphrase. A public key is 32 raw bytes. The
hex sha256 prefix of an account's first key is its id for good, so an id can be checked against that key, and a later
key against the ledger (`gym_fed.trust.identity.history`), without asking anybody.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import make_folder, write_atomically
from gym_fed.trust.identity.canonical import canonical_json
from gym_fed.trust.identity.encryption import encrypted_pem, is_encrypted, plain_pem

PUBLIC_KEY_BYTES = 32

Passphrase = Callable[[str], bytes]
"""Gives the passphrase of what is named."""


CONTRIBUTOR_PATTERN = r"c[0-9a-f]{16}(?:[0-9a-f]{16})?"
"""The id of an account: 32 hex digits, or the 16 of an account that was made by gym-fed 0.1."""

_CONTRIBUTOR = re.compile(CONTRIBUTOR_PATTERN, re.ASCII)


def contributor_id(public_key: bytes) -> str:
    """The id of an account: ``c`` and the first 32 hex digits (128 bits) of its first key's sha256."""
    return "c" + hashlib.sha256(public_key).hexdigest()[:32]


def is_contributor_id(text: str) -> bool:
    """Whether ``text`` has the form of an account's id."""
    return _CONTRIBUTOR.fullmatch(text) is not None


def is_id_of(contributor: str, public_key: bytes) -> bool:
    """Whether ``contributor`` is the id that ``public_key`` gives to an account, in today's form or that of 0.1."""
    return is_contributor_id(contributor) and contributor_id(public_key).startswith(contributor)


def server_id(ledger_public_key: bytes) -> str:
    """The id of a hub: ``s`` and the first 16 hex digits of its ledger key's sha256."""
    return "s" + hashlib.sha256(ledger_public_key).hexdigest()[:16]


class SigningKey:
    """A private key that signs canonical JSON, in the name of an account.

    Args:
        key: The private key.
        account: Id of the account; empty: the one whose first key this is.
    """

    def __init__(self, key: Ed25519PrivateKey, account: str = "") -> None:
        self._key = key
        self._account = account

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def load(cls, path: Path, passphrase: Passphrase | None = None) -> SigningKey:
        """Read a PEM file.

        Args:
            path: The file.
            passphrase: Called with the file's name for the passphrase of an encrypted file.

        Raises:
            GymError: ``FILE_NOT_FOUND``; ``STATE_CORRUPT`` when it holds no Ed25519 key; ``KEY_LOCKED`` when the
                passphrase is not given or is wrong.
        """
        try:
            pem = path.read_bytes()
        except FileNotFoundError as error:
            raise GymError(ErrorCode.FILE_NOT_FOUND, f"no key at {path}") from error
        return cls(read_private_key(pem, str(path), passphrase))

    def save(self, path: Path, passphrase: bytes | None = None) -> None:
        """Write the key with mode 0600, under a passphrase if one is given; never over an existing one."""
        if path.exists():
            raise GymError(ErrorCode.FILE_EXISTS, f"{path} exists; a key is never overwritten")
        write_atomically(path, self.to_pem(passphrase), mode=0o600)

    def to_pem(self, passphrase: bytes | None = None) -> bytes:
        """PKCS#8 PEM."""
        return plain_pem(self._key) if passphrase is None else encrypted_pem(self._key, passphrase)

    @property
    def public_key(self) -> bytes:
        """32 raw bytes."""
        return self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    @property
    def contributor(self) -> str:
        """Id of the account that it signs for: by its own hash, or by that of the account's first key."""
        return self._account or contributor_id(self.public_key)

    def of_account(self, contributor: str) -> SigningKey:
        """The same key, signing for an account that had another one first."""
        return SigningKey(self._key, contributor)

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


def load_or_create(path: Path, passphrase: Passphrase | None = None) -> SigningKey:
    """The key at ``path``, generated on first use."""
    if not path.exists():
        make_folder(path.parent)
        os.chmod(path.parent, 0o700)
        SigningKey.generate().save(path)
    return SigningKey.load(path, passphrase)


def read_private_key(pem: bytes, what: str, passphrase: Passphrase | None) -> Ed25519PrivateKey:
    """An Ed25519 key from PEM; raises as ``SigningKey.load``."""
    secret: bytes | None = None
    if is_encrypted(pem):
        if passphrase is None:
            raise GymError(ErrorCode.KEY_LOCKED, f"{what} is under a passphrase, and none was given")
        secret = passphrase(what)
    try:
        key = load_pem_private_key(pem, password=secret)
    except (ValueError, TypeError) as error:
        if secret is not None and "password" in str(error).lower():
            raise GymError(
                ErrorCode.KEY_LOCKED, f"the passphrase does not open {what}", "try again"
            ) from error
        raise GymError(ErrorCode.STATE_CORRUPT, f"{what} is not a readable private key") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise GymError(ErrorCode.STATE_CORRUPT, f"{what} is not an Ed25519 key")
    return key
