"""Trust in signers: the first key of a model is shown by fingerprint, accepted, and pinned (trust on first use).

Anybody who can write to a store can publish a version under any name, so a name is identified by its signing keys, like
a hub by its key. The first key must be accepted by a person or named by ``--signer``; a different key is refused until
it is named.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from pydantic import Field, ValidationError

from gym_fed.config.schema.base import StrictModel
from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.files import default_home, make_folder, write_atomically
from gym_fed.registry.manifest import Signer
from gym_fed.trust.identity.keys import SigningKey, load_or_create
from gym_fed.trust.identity.passphrase import PassphraseSource

Confirm = Callable[[str, Signer], bool]
"""Prompts the user to confirm a model's reference and signing key."""

_FINGERPRINT = re.compile(r"(sha256:)?([0-9a-f]{64})", re.ASCII)
_PASSPHRASE = PassphraseSource("GYM_PASSPHRASE")


class _Pin(StrictModel):
    registry: str
    name: str
    public_keys: list[str] = Field(max_length=64)


def own_key() -> SigningKey:
    """Return the user's key, ``key.pem`` in the home, which is also the contributor's key; created on first use.

    Raises:
        GymError: ``KEY_LOCKED`` if it has a passphrase that is not given.
    """
    return load_or_create(default_home() / "key.pem", _PASSPHRASE.get)


def _parsed_fingerprint(text: str) -> str:
    """Normalise a fingerprint, ``sha256:<hex>`` or only the hex digits, to ``sha256:<hex>``.

    Raises:
        GymError: ``USAGE``.
    """
    match = _FINGERPRINT.fullmatch(text.strip().lower())
    if match is None:
        raise GymError(
            ErrorCode.USAGE, f"{text[:90]!r} is not a fingerprint", "use sha256: and 64 hex digits"
        )
    return f"sha256:{match[2]}"


class Pins:
    """The keys that are trusted for the models of one registry."""

    def __init__(self, registry: str) -> None:
        self._registry = registry

    def keys(self, name: str) -> list[bytes]:
        """Return the public keys that are pinned for a model.

        Raises:
            GymError: ``STATE_CORRUPT`` for a pin that cannot be read.
        """
        path = self._path(name)
        if not path.exists():
            return []
        try:
            pin = _Pin.model_validate_json(path.read_bytes())
            return [bytes.fromhex(key) for key in pin.public_keys]
        except (ValidationError, ValueError) as error:
            raise GymError(
                ErrorCode.STATE_CORRUPT,
                f"{path}: not a file of pinned signers",
                "delete it, and compare the fingerprint again",
            ) from error

    def add(self, name: str, signer: Signer) -> None:
        """Trust a key for a model from now on."""
        known = self.keys(name)
        if signer.public_key in known:
            return
        keys = [key.hex() for key in (*known, signer.public_key)]
        pin = _Pin(registry=self._registry, name=name, public_keys=keys)
        make_folder(self._path(name).parent, 0o700)
        write_atomically(self._path(name), pin.model_dump_json(indent=1).encode())

    def require(
        self, name: str, signed: str, signer: Signer, confirm: Confirm | None, expected: str | None
    ) -> None:
        """Check that a key may sign for a model; pin it when it is accepted.

        Args:
            signed: The name of the signed object for messages: ``name@version``.
            confirm: Confirms the first key of a model; None refuses it.
            expected: The fingerprint named by the user; it replaces a pinned one.

        Raises:
            GymError: ``SIGNATURE_INVALID`` for a key other than the expected or pinned one; ``UNAUTHENTICATED`` for a
                first key that cannot be confirmed; ``PERMISSION_DENIED`` if the user declines.
        """
        known = self.keys(name)
        if expected is not None:
            if _parsed_fingerprint(expected) != signer.fingerprint:
                raise GymError(
                    ErrorCode.SIGNATURE_INVALID,
                    f"{signed} is signed by {signer.fingerprint}, not by {_parsed_fingerprint(expected)}",
                    "ask its author for the fingerprint of the key",
                )
            self.add(name, signer)
            return
        if signer.public_key in known:
            return
        if known:
            pinned = ", ".join(Signer(key).fingerprint for key in known)
            raise GymError(
                ErrorCode.SIGNATURE_INVALID,
                f"{signed} is signed by a different key, {signer.fingerprint}; pinned for {name}: {pinned}",
                f"ask its author; if the key is right, pass --signer {signer.fingerprint}",
            )
        if confirm is None:
            raise GymError(
                ErrorCode.UNAUTHENTICATED,
                f"{signed} is signed by {signer.fingerprint}, an unknown key",
                f"compare it with its author's, then pass --signer {signer.fingerprint}",
            )
        if not confirm(signed, signer):
            raise GymError(
                ErrorCode.PERMISSION_DENIED, f"{signed}: its signer {signer.fingerprint} was not accepted"
            )
        self.add(name, signer)

    def _path(self, name: str) -> Path:
        digest = hashlib.sha256(f"{self._registry}\n{name}".encode()).hexdigest()
        return default_home() / "signers" / f"{digest[:32]}.json"
