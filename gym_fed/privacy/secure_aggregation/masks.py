"""Masks: AES-256-CTR key streams added to votes modulo a power of two, which cancel between pairs.

Flower's ``pseudo_rand_gen`` is no stand-in: it folds the secret to 32 bits and draws from numpy's Mersenne Twister, so
that an attacker who tries 2^32 seeds unmasks a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from numpy.typing import NDArray

from gym_fed.privacy.secure_aggregation.keys import shared_key

Words: TypeAlias = NDArray[Any]
"""``[n]`` uint8 or uint16: numbers modulo a power of two that the type's own wrapping does not disturb."""

MAX_BITS = 16


@dataclass(frozen=True)
class Mask:
    """A key stream, and its sign."""

    key: bytes
    negative: bool = False

    @property
    def inverse(self) -> Mask:
        """The mask that cancels this one."""
        return Mask(self.key, not self.negative)


class MaskSum:
    """The sum of several masks as a stream; each ``take`` continues where the last one ended."""

    def __init__(self, masks: Sequence[Mask], bits: int) -> None:
        self._dtype = word_type(bits)
        # The counter starts at zero: a key is derived for one round and one pair, and used for one stream.
        self._streams = [
            (Cipher(AES256(mask.key), CTR(bytes(16))).encryptor(), mask.negative) for mask in masks
        ]

    def take(self, count: int) -> Words:
        """The next ``count`` words, ``[count]``, not reduced below the word size."""
        total = np.zeros(count, self._dtype)
        zeros = bytes(count * self._dtype.itemsize)
        for stream, negative in self._streams:
            words = np.frombuffer(stream.update(zeros), self._dtype)
            total = total - words if negative else total + words
        return total


def word_type(bits: int) -> np.dtype[Any]:
    """The little-endian integer type for this number of bits."""
    return np.dtype("u1") if bits <= 8 else np.dtype("<u2")


def pair_mask(
    own: str, other: str, private: bytes, other_public: bytes, server: str, server_round: int
) -> Mask:
    """The mask of ``own`` against ``other``, from one's private and the other's public key.

    Of two contributors the one whose id comes first adds, the other takes away.
    """
    key = shared_key(private, other_public, "mask", server, server_round)
    return Mask(key, negative=own > other)
