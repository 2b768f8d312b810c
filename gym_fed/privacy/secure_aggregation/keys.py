"""Pairwise keys of contributors that the hub does not know, and masks derived from them: X25519, HKDF and AES.

A mask is an AES-256-CTR key stream that is added to votes modulo a power of two. The masks of a pair cancel. Flower's
``pseudo_rand_gen`` is not used: it reduces the secret to 32 bits and draws from numpy's Mersenne Twister, so an
attacker can unmask a vector by trying 2^32 seeds.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.json_files import canonical_json

SECRET_BYTES = 32
_NONCE_BYTES = 12


def new_secret() -> bytes:
    """Generate 32 random bytes, for an X25519 private key or a seed of masks."""
    return secrets.token_bytes(SECRET_BYTES)


def public_of(private: bytes) -> bytes:
    """Derive the X25519 public key of a private key; both have 32 bytes."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def commitment(seed: bytes) -> str:
    """Compute a contributor's commitment to its seed as hex SHA-256; it is hiding, since the seed is random."""
    return hashlib.sha256(b"gym-secagg-1 seed\0" + seed).hexdigest()


def share_commitment(share: bytes, secret: str, dealer: str, holder: str) -> str:
    """Compute a dealer's commitment to the share of a secret for one holder, as hex SHA-256.

    It reveals nothing about the share: to a holder of fewer shares than the threshold, the share is as random as the
    secret.

    Args:
        share: The share.
        secret: ``seed`` or ``mask``.
        dealer: Id of the contributor who owns the secret.
        holder: Id of the contributor who receives the share.
    """
    whose = canonical_json(["gym-secagg-1 share", secret, dealer, holder])
    return hashlib.sha256(whose + b"\0" + share).hexdigest()


def share_commitments(seed: bytes, mask_key: bytes, dealer: str, holder: str) -> tuple[str, str]:
    """Compute the dealer's commitments to both shares for a holder."""
    return (
        share_commitment(seed, "seed", dealer, holder),
        share_commitment(mask_key, "mask", dealer, holder),
    )


def require_shareable(public: bytes) -> None:
    """Reject a public key that cannot produce a shared secret.

    Raises:
        GymError: ``SIGNATURE_INVALID`` for a key of low order (RFC 7748, section 6.1), with which the shared value is
            public.
    """
    _agreed(b"\x01" * SECRET_BYTES, public)


def shared_key(private: bytes, public: bytes, purpose: str, server: str, server_round: int) -> bytes:
    """Derive 32 bytes that only the holders of the two private keys can compute, different for each purpose and round.

    Raises:
        GymError: ``SIGNATURE_INVALID`` for a public key of low order, with which there is no shared secret.
    """
    agreed = _agreed(private, public)
    info = canonical_json(["gym-secagg-1", purpose, server, server_round])
    return HKDF(algorithm=SHA256(), length=SECRET_BYTES, salt=None, info=info).derive(agreed)


def _agreed(private: bytes, public: bytes) -> bytes:
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError as error:
        raise GymError(
            ErrorCode.SIGNATURE_INVALID, f"{public.hex()[:16]} is not a public key for masks: {error}"
        ) from error


def seal(key: bytes, plain: bytes, sender: str, receiver: str) -> bytes:
    """Encrypt a message for one receiver, authenticating both sender and receiver."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, plain, canonical_json([sender, receiver]))


def unseal(key: bytes, sealed: bytes, sender: str, receiver: str) -> bytes:
    """Decrypt a message that was encrypted with ``seal``.

    Raises:
        GymError: ``UPDATE_REFUSED`` if the message was not sealed by the sender for this receiver.
    """
    try:
        nonce, data = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        return AESGCM(key).decrypt(nonce, data, canonical_json([sender, receiver]))
    except (InvalidTag, ValueError) as error:
        raise GymError(
            ErrorCode.UPDATE_REFUSED,
            f"the share from {sender} that the hub forwarded is not the one that {sender} sealed",
            "sit this round out; report it to the coordinator if it happens again",
        ) from error


Words: TypeAlias = NDArray[Any]
"""``[n]`` uint8 or uint16: numbers modulo a power of two that divides the modulus of the type."""

MAX_BITS = 16


@dataclass(frozen=True)
class Mask:
    """A key stream and its sign."""

    key: bytes
    negative: bool = False

    @property
    def inverse(self) -> Mask:
        """The mask that cancels this one."""
        return Mask(self.key, not self.negative)


class MaskSum:
    """The sum of several masks as a stream; each ``take`` continues after the previous one."""

    def __init__(self, masks: Sequence[Mask], bits: int) -> None:
        self._dtype = word_type(bits)
        # The counter starts at zero, since each key is derived for one round and one pair, and used for one stream.
        self._streams = [
            (Cipher(AES256(mask.key), CTR(bytes(16))).encryptor(), mask.negative) for mask in masks
        ]

    def take(self, count: int) -> Words:
        """Return the next ``count`` words, ``[count]``, not reduced modulo 2^k."""
        total = np.zeros(count, self._dtype)
        zeros = bytes(count * self._dtype.itemsize)
        for stream, negative in self._streams:
            words = np.frombuffer(stream.update(zeros), self._dtype)
            total = total - words if negative else total + words
        return total


def word_type(bits: int) -> np.dtype[Any]:
    """Return the little-endian integer type for a number of bits."""
    return np.dtype("u1") if bits <= 8 else np.dtype("<u2")


def pair_mask(
    own: str, other: str, private: bytes, other_public: bytes, server: str, server_round: int
) -> Mask:
    """Derive the mask between two contributors, from the private key of ``own`` and the public key of ``other``.

    The contributor whose id sorts first adds the mask, and the other one subtracts it.
    """
    key = shared_key(private, other_public, "mask", server, server_round)
    return Mask(key, negative=own > other)
