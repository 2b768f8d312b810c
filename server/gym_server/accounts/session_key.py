"""`keys/session.key`: the secret under a hub's session tokens, under the passphrase that its other keys are under.

It is 32 random bytes, written as the seed of an Ed25519 key, so that the same envelope holds it as holds `ledger.pem`.
gym-fed 0.1 wrote the bare bytes, never under a passphrase; such a file is written anew when the hub is opened.
"""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import write_atomically
from gym_fed.trust.identity.keys import encrypted_pem, is_encrypted, plain_pem, read_private_key
from gym_fed.trust.identity.passphrase import PassphraseSource

NAME = "session.key"
_OLD_BYTES = 32


def create_session_key(keys: Path, passphrase: bytes | None) -> None:
    """Write a fresh one into the folder ``keys``; sessions under the last one end."""
    _write(keys / NAME, Ed25519PrivateKey.generate(), passphrase)


def session_key(keys: Path, passphrase: PassphraseSource) -> bytes:
    """The 32 bytes; made anew where the file is missing, and put under the passphrase where ``ledger.pem`` is.

    Raises:
        GymError: ``KEY_LOCKED``; ``STATE_CORRUPT`` for a file that holds neither form.
    """
    path = keys / NAME
    hidden = is_encrypted((keys / "ledger.pem").read_bytes())
    if not path.exists():
        create_session_key(keys, passphrase.get(str(path)) if hidden else None)
    found = path.read_bytes()
    if len(found) == _OLD_BYTES:
        key = Ed25519PrivateKey.from_private_bytes(found)
    else:
        try:
            key = read_private_key(found, str(path), passphrase.get)
        except GymError as error:
            if error.code is not ErrorCode.STATE_CORRUPT:
                raise
            raise GymError(
                error.code, error.message, "delete it: every session ends, and nothing else"
            ) from error
    if len(found) == _OLD_BYTES or (hidden and not is_encrypted(found)):
        _write(path, key, passphrase.get(str(path)) if hidden else None)
    return key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())


def _write(path: Path, key: Ed25519PrivateKey, passphrase: bytes | None) -> None:
    pem = plain_pem(key) if passphrase is None else encrypted_pem(key, passphrase)
    write_atomically(path, pem, mode=0o600)
