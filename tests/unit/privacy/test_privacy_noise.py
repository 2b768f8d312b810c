"""Noise: exactly the distribution that is named, the same from one seed, and exact where floats are not."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from gym_fed.core.errors import GymError
from gym_fed.privacy import noise
from gym_fed.privacy.noise import NoiseSource

SEED = bytes(range(32))
DRAWS = 400_000


def chi_squared(draws: np.ndarray, chances: dict[int, float]) -> float:
    """Pearson's statistic over the values that are expected at least 20 times, as standard deviations off its mean."""
    kept = {k: p for k, p in chances.items() if p * len(draws) >= 20}
    observed = np.array([np.count_nonzero(draws == k) for k in kept] + [0.0])
    observed[-1] = len(draws) - observed.sum()
    expected = np.array([*kept.values(), 1 - sum(kept.values())]) * len(draws)
    degrees = len(expected) - 1
    return float((((observed - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


@pytest.mark.parametrize("std", [0.3, 1.0, 7.5])
def test_a_rounded_gaussian_has_the_chances_of_a_normal_variable_rounded(std: float) -> None:
    draws = NoiseSource(SEED).rounded_gaussian(std, DRAWS, "w")
    chances = {k: float(mpmath.ncdf((k + 0.5) / std) - mpmath.ncdf((k - 0.5) / std)) for k in range(-60, 61)}
    assert abs(chi_squared(draws, chances)) < 5


@pytest.mark.parametrize("variance", [1, 10, 2_500])
def test_a_discrete_gaussian_has_the_chances_of_its_definition(variance: int) -> None:
    draws = NoiseSource(SEED).discrete_gaussian(variance, DRAWS, "w")
    reach = range(-8 * math.isqrt(variance) - 8, 8 * math.isqrt(variance) + 9)
    weights = {k: math.exp(-k * k / (2 * variance)) for k in reach}
    total = sum(weights.values())
    assert abs(chi_squared(draws, {k: w / total for k, w in weights.items()})) < 5


def test_wide_noise_has_its_standard_deviation_and_no_sign() -> None:
    wide = NoiseSource(SEED).rounded_gaussian(2.0**26, DRAWS, "w") / 2.0**26
    assert abs(wide.mean()) < 5 / math.sqrt(DRAWS)
    assert abs(wide.std() - 1) < 5 / math.sqrt(2 * DRAWS)


@pytest.mark.parametrize("portion", [1_000, 65_536, 70_001])
def test_the_numbers_do_not_depend_on_how_many_are_asked_for_at_once(portion: int) -> None:
    count = 140_000
    whole, parts = NoiseSource(SEED), NoiseSource(SEED)
    for draw in (
        lambda source, n: source.rounded_gaussian(1e5, n, "w"),
        lambda source, n: source.discrete_gaussian(10**6, n, "w"),
    ):
        asked = [min(portion, count - start) for start in range(0, count, portion)]
        assert np.array_equal(draw(whole, count), np.concatenate([draw(parts, n) for n in asked]))


def test_streams_and_seeds_are_independent() -> None:
    source = NoiseSource(SEED)
    a, b = source.rounded_gaussian(1e6, 100_000, "a"), source.rounded_gaussian(1e6, 100_000, "b")
    other = NoiseSource(bytes(32)).rounded_gaussian(1e6, 100_000, "a")
    for x, y in ((a, b), (a, other)):
        assert abs(np.corrcoef(x, y)[0, 1]) < 5 / math.sqrt(100_000)


@pytest.mark.parametrize("kind", ["gaussian", "discrete"])
def test_what_floats_leave_open_is_settled_to_the_same_number(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a filter so coarse that mpmath settles a good part of all draws, they are what they were."""
    settled = 0

    def counting(name: str) -> None:
        original = getattr(noise, name)

        def call(*args: object) -> object:
            nonlocal settled
            settled += 1
            return original(*args)

        monkeypatch.setattr(noise, name, call)

    def draw() -> np.ndarray:
        source = NoiseSource(SEED)
        if kind == "gaussian":
            return source.rounded_gaussian(300.0, 2_000, "w")
        return source.discrete_gaussian(90_000, 1_000, "w")

    monkeypatch.setattr(noise, "_CHUNK", 2_000)
    expected = draw()
    for name in ("_settled_gaussian", "_settled_geometric", "_settled_chance"):
        counting(name)
    monkeypatch.setattr(noise, "_TOLERANCE", 1e-4)
    assert np.array_equal(draw()[: len(expected)], expected)
    assert settled > 20


def test_a_quantile_is_as_near_as_the_filter_takes_it_to_be() -> None:
    rng = np.random.default_rng(0)
    for exponent in range(1, 64):
        tail = max(1, int(2**exponent * rng.random()))
        found = float(noise._quantile(np.array([float(tail)]))[0])
        with mpmath.workprec(400):
            share = 1 - mpmath.ldexp(tail, -63)
            true = mpmath.sqrt(2) * mpmath.erfinv(share)
            assert abs(true - found) < noise._TOLERANCE / 100 * (1 + true)


def test_a_short_seed_and_a_useless_width_are_refused() -> None:
    with pytest.raises(GymError, match="32 bytes"):
        NoiseSource(b"short")
    with pytest.raises(GymError, match="standard deviation"):
        NoiseSource(SEED).rounded_gaussian(0.0, 1, "w")
    with pytest.raises(GymError, match="variance"):
        NoiseSource(SEED).discrete_gaussian(0, 1, "w")
