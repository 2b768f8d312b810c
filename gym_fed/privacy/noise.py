"""Sample exact integer noise from a cryptographic stream, independent of floating-point rounding.

Adding ``numpy.random.normal`` to a sum of floats is not private: the generator is predictable, and the set of possible
float results reveals the sum (Mironov 2012, "On Significance of the Least Significant Bits for Differential Privacy").
Here, both the sums and the noise are integers on a lattice:

* ``rounded_gaussian`` is a normal variable rounded to the nearest integer. The sum with an integer equals the sum with
  the normal variable, rounded: a post-processing of the Gaussian mechanism, whose privacy bound applies.
* ``discrete_gaussian`` has probability proportional to exp(-k^2 / 2 sigma^2) at each integer k (Canonne, Kamath,
  Steinke 2020, arXiv:2004.00010). Its concentrated-DP bound is that of the Gaussian with the same variance (theorem
  14 there).

Both invert the distribution at a uniform number, of which 64 bits are drawn at first. A float result is used only if
its error, generously bounded, cannot change the integer. Otherwise (a few in a million draws), more bits are drawn, and
mpmath computes the result with sufficient precision. The same seed gives the same noise on every machine, however the
draws are split into calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from gym_fed.core.errors import ErrorCode, GymError
from gym_fed.core.lazy import torch

SEED_BYTES = 32
MAX_STD = 2.0**32
"""Maximum standard deviation; above it, too many draws would need mpmath."""

_CHUNK = 1 << 16
_EXTRA_BITS = 192
_PRECISION_BITS = 512
_TOLERANCE = 1e-12
"""Bound on the error of a float64 quantile near one; observed errors are below 2e-14."""


class NoiseSource:
    """Independent noise streams that are derived from one secret seed.

    Args:
        seed: 32 unpredictable bytes, such as ``os.urandom(32)``. Anybody who knows them can remove the noise.
    """

    def __init__(self, seed: bytes) -> None:
        if len(seed) != SEED_BYTES:
            raise GymError(ErrorCode.USAGE, f"a noise seed has {SEED_BYTES} bytes, not {len(seed)}")
        self._seed = seed
        self._streams: dict[tuple[str, Any, str], _Buffered] = {}

    def rounded_gaussian(self, std: float, count: int, stream: str) -> np.ndarray:
        """Return the next ``count`` draws of N(0, std^2), rounded to integers, ``[count]`` int64.

        Args:
            std: Standard deviation before rounding, at most 2^32.
            count: Number of draws.
            stream: Name of the stream; streams with different names are independent.
        """
        if not 0 < std <= MAX_STD:
            raise GymError(
                ErrorCode.USAGE,
                f"a standard deviation of {std} is outside (0, 2^32]",
                "choose another lattice step",
            )
        return self._take(("gaussian", float(std), stream), lambda bits: _rounded_gaussian(bits, std), count)

    def discrete_gaussian(self, variance: int, count: int, stream: str) -> np.ndarray:
        """Return the next ``count`` draws of the discrete Gaussian with sigma^2 = ``variance``, ``[count]`` int64."""
        if not 1 <= variance <= int(MAX_STD) ** 2 >> 16:
            raise GymError(ErrorCode.USAGE, f"a variance of {variance} is outside [1, 2^48]")
        return self._take(
            ("discrete", int(variance), stream), lambda bits: _discrete_gaussian(bits, int(variance)), count
        )

    def _take(
        self, key: tuple[str, Any, str], sample: Callable[[_Bits], np.ndarray], count: int
    ) -> np.ndarray:
        if key not in self._streams:
            self._streams[key] = _Buffered(_Bits(self._seed, "/".join(map(str, key))), sample)
        return self._streams[key].take(count)


class _Bits:
    """A stream of uniform bits: AES-256 in counter mode with a key derived from the seed and the stream's name."""

    def __init__(self, seed: bytes, name: str) -> None:
        key = HKDF(SHA256(), 32, salt=b"gym-noise-1", info=name.encode()).derive(seed)
        self._stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()

    def words(self, count: int) -> np.ndarray:
        """Return the next ``count`` words, ``[count]`` uint64."""
        return np.frombuffer(self._stream.update(bytes(8 * count)), dtype="<u8")

    def integer(self, bits: int) -> int:
        return int.from_bytes(self._stream.update(bytes(bits // 8)), "little")


class _Buffered:
    """A stream that draws in fixed-size chunks, so that the numbers do not depend on the sizes of requests."""

    def __init__(self, bits: _Bits, sample: Callable[[_Bits], np.ndarray]) -> None:
        self._bits, self._sample = bits, sample
        self._rest = np.empty(0, dtype=np.int64)

    def take(self, count: int) -> np.ndarray:
        parts, missing = [self._rest[:count]], count - len(self._rest)
        self._rest = self._rest[count:]
        while missing > 0:
            drawn = self._sample(self._bits)
            parts.append(drawn[:missing])
            self._rest = drawn[missing:]
            missing -= len(drawn)
        return np.concatenate(parts)


def _rounded_gaussian(bits: _Bits, std: float) -> np.ndarray:
    """Draw a chunk. The top bit of a word is the sign; the rest is a uniform p in [0, 1/2), the tail probability."""
    words = bits.words(_CHUNK)
    negative, tail = (words >> np.uint64(63)).astype(bool), words & np.uint64(2**63 - 1)
    low = _quantile(tail.astype(np.float64) + 1.0) * std
    high = _quantile(tail.astype(np.float64)) * std
    margin = _TOLERANCE * (std + low)
    value, above = np.floor(low - margin + 0.5), np.floor(high + margin + 0.5)
    value = np.maximum(value, 0.0)
    for index in np.flatnonzero(value != above):
        value[index] = _settled_gaussian(int(tail[index]), std, int(value[index]), bits)
    return np.where(negative, -value, value).astype(np.int64)


def _quantile(tail: np.ndarray) -> np.ndarray:
    """Return the z that a normal variable exceeds with probability tail / 2^64, ``[n]`` float64; infinite at 0."""
    quantiles: np.ndarray = torch.special.ndtri(torch.from_numpy(tail * 2.0**-64)).numpy()
    return -quantiles


def _settled_gaussian(tail: int, std: float, least: int, bits: _Bits) -> int:
    """Return the integer m with Q((m + 1/2) / std) <= p < Q((m - 1/2) / std), drawing as many bits of p as needed."""
    import mpmath

    return _settled(
        tail,
        64,
        least,
        lambda m: mpmath.erfc((mpmath.mpf(m) + 0.5) / (mpmath.mpf(std) * mpmath.sqrt(2))) / 2,
        bits,
    )


def _settled(begun: int, length: int, value: int, edge: Callable[[int], Any], bits: _Bits) -> int:
    """Return the smallest integer, starting from ``value``, whose ``edge`` does not exceed a uniform number.

    Args:
        begun: The first bits of the uniform number.
        length: Number of bits in ``begun``; more are drawn as needed.
        value: An integer that is not above the result.
        edge: A decreasing function from an integer to a probability, computed at mpmath's current precision.
        bits: Source of further bits.
    """
    import mpmath

    with mpmath.workprec(_PRECISION_BITS):
        known, length = (begun << _EXTRA_BITS) + bits.integer(_EXTRA_BITS), length + _EXTRA_BITS
        while True:
            scaled = mpmath.ldexp(edge(value), length)
            if known >= scaled:
                return value
            if known + 1 <= scaled:
                value += 1
                continue
            known, length = (known << _EXTRA_BITS) + bits.integer(_EXTRA_BITS), length + _EXTRA_BITS


def _discrete_gaussian(bits: _Bits, variance: int) -> np.ndarray:
    """Draw a chunk by rejection sampling from a discrete Laplace variable of scale t (algorithm 3 of the paper).

    For a standard exponential variable E, ``floor(t E)`` is exactly geometric with ratio exp(-1/t).
    """
    scale = int(np.sqrt(variance)) + 1
    draws = bits.words(2 * _CHUNK).reshape(2, _CHUNK)
    negative = (draws[0] & np.uint64(1)).astype(bool)
    first = draws[0] >> np.uint64(1)
    with np.errstate(divide="ignore"):
        low = -np.log((first.astype(np.float64) + 1.0) * 2.0**-63) * scale
        high = -np.log(first.astype(np.float64) * 2.0**-63) * scale
    margin = _TOLERANCE * (scale + low)
    size, above = np.floor(np.maximum(low - margin, 0.0)), np.floor(high + margin)
    for index in np.flatnonzero(size != above):
        size[index] = _settled_geometric(int(first[index]), scale, int(size[index]), bits)
    exponent = (size * scale - variance) ** 2 / (2.0 * variance * scale * scale)
    chance = np.exp(-exponent) * 2.0**64
    uniform = draws[1].astype(np.float64)
    margin = (chance * (1.0 + exponent) + uniform) * _TOLERANCE + 2.0
    accepted = uniform + margin < chance
    for index in np.flatnonzero(np.abs(uniform - chance) <= margin):
        accepted[index] = _settled_chance(int(draws[1][index]), int(size[index]), scale, variance, bits)
    accepted &= ~(negative & (size == 0))  # zero must not be counted twice, as +0 and -0
    accepted_draws: np.ndarray = np.where(negative, -size, size)[accepted].astype(np.int64)
    return accepted_draws


def _settled_geometric(first: int, scale: int, least: int, bits: _Bits) -> int:
    """Return the m with exp(-(m + 1) / scale) <= u < exp(-m / scale), drawing as many bits of u as needed."""
    import mpmath

    return _settled(first, 63, least, lambda m: mpmath.exp(-mpmath.mpf(m + 1) / scale), bits)


def _settled_chance(uniform: int, size: int, scale: int, variance: int, bits: _Bits) -> bool:
    """Return True if a uniform number, drawn to as many bits as needed, is below the acceptance probability."""
    import mpmath

    with mpmath.workprec(_PRECISION_BITS):
        exponent = mpmath.mpf((size * scale - variance) ** 2) / (2 * variance * scale * scale)
        known, length = uniform, 64
        while True:
            scaled = mpmath.ldexp(mpmath.exp(-exponent), length)
            if known + 1 <= scaled:
                return True
            if known >= scaled:
                return False
            known, length = (known << _EXTRA_BITS) + bits.integer(_EXTRA_BITS), length + _EXTRA_BITS
