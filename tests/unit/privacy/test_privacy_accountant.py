"""The accountant: dp-accounting's own figures, whatever the order and grouping, and honest about what bounds what."""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from gym_fed.core.errors import GymError
from gym_fed.privacy import accountant
from gym_fed.privacy.accountant import NoiseEvent, accountant_name, epsilon, noise_multiplier_for

DELTA = 1e-5


@pytest.mark.parametrize(
    ("noise_multiplier", "sampling", "count"), [(1.0, 1.0, 1), (2.5, 1.0, 20), (1.1, 0.05, 40)]
)
def test_epsilon_is_that_of_dp_accounting(noise_multiplier: float, sampling: float, count: int) -> None:
    theirs = PLDAccountant()
    event = dp_accounting.GaussianDpEvent(noise_multiplier)
    theirs.compose(dp_accounting.PoissonSampledDpEvent(sampling, event) if sampling < 1 else event, count)
    ours = epsilon(
        [NoiseEvent(noise_multiplier=noise_multiplier, sampling_probability=sampling, count=count)],
        DELTA,
    )
    assert ours == pytest.approx(theirs.get_epsilon(DELTA), abs=1e-3)


def test_rounds_of_unlike_noise_cost_what_they_cost_one_after_the_other() -> None:
    theirs = PLDAccountant()
    for noise_multiplier in (1.0, 2.0, 4.0):
        theirs.compose(dp_accounting.GaussianDpEvent(noise_multiplier))
    events = [NoiseEvent(noise_multiplier=z) for z in (4.0, 1.0, 2.0)]
    assert epsilon(events, DELTA) == pytest.approx(theirs.get_epsilon(DELTA), abs=1e-3)


def test_epsilon_is_what_the_gaussian_mechanism_has_in_closed_form() -> None:
    """Balle and Wang 2018, theorem 8."""
    spent = epsilon([NoiseEvent(noise_multiplier=1.5)], DELTA)

    def normal(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    def delta(e: float) -> float:
        return normal(0.5 / 1.5 - e * 1.5) - math.exp(e) * normal(-0.5 / 1.5 - e * 1.5)

    assert delta(spent) <= DELTA <= delta(spent - 1e-3)


def test_a_discrete_gaussian_is_accounted_by_renyi_divergences() -> None:
    theirs = RdpAccountant()
    theirs.compose(dp_accounting.GaussianDpEvent(2.0), 5)
    events = [NoiseEvent(mechanism="discrete_gaussian", noise_multiplier=2.0, count=5)]
    assert accountant_name(events, DELTA) == "rdp"
    assert epsilon(events, DELTA) == pytest.approx(theirs.get_epsilon(DELTA), abs=1e-3)
    assert epsilon(events, DELTA) > epsilon([NoiseEvent(noise_multiplier=2.0, count=5)], DELTA)


def test_nothing_released_costs_nothing_and_more_costs_more() -> None:
    costs = [epsilon([NoiseEvent(noise_multiplier=3.0)] * n, DELTA) for n in range(4)]
    assert costs[0] == 0.0
    assert costs == sorted(set(costs))


def test_the_noise_for_a_target_meets_it_and_hardly_more() -> None:
    found = noise_multiplier_for(2.0, DELTA, count=10)
    assert epsilon([NoiseEvent(noise_multiplier=found, count=10)], DELTA) <= 2.0
    assert epsilon([NoiseEvent(noise_multiplier=found * 0.99, count=10)], DELTA) > 2.0


@pytest.mark.parametrize("target", [1e-3, 0.5, 8.0, 100.0, 1000.0])
def test_the_noise_for_a_target_is_found_in_closed_form_however_large(
    target: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Privacy loss distributions of so little noise take minutes, and the search tries many."""
    monkeypatch.setattr("dp_accounting.pld.PLDAccountant", None)
    found = noise_multiplier_for(target, DELTA, count=10)
    assert epsilon([NoiseEvent(noise_multiplier=found, count=10)], DELTA) <= target
    assert epsilon([NoiseEvent(noise_multiplier=found * 0.999, count=10)], DELTA) > target


@pytest.mark.parametrize("target", [1001.0, math.inf, math.nan])
def test_a_target_that_gives_no_privacy_is_refused_with_the_limit(target: float) -> None:
    with pytest.raises(GymError, match=r"target_epsilon .* at most 1,000"):
        noise_multiplier_for(target, DELTA, count=10)


def test_a_target_that_no_noise_meets_is_refused() -> None:
    with pytest.raises(GymError, match="cannot be reached in 1,000,000 steps"):
        noise_multiplier_for(1e-3, DELTA, count=1_000_000)


def test_a_delta_that_is_no_probability_is_refused() -> None:
    with pytest.raises(GymError, match="target_delta"):
        epsilon([NoiseEvent(noise_multiplier=1.0)], 0.0)
    with pytest.raises(GymError, match="target_epsilon"):
        noise_multiplier_for(0.0, DELTA)


@pytest.mark.parametrize("noise_multiplier", [1e-12, 1e-200])
@pytest.mark.parametrize("sampling", [0.1, 1.0])
def test_noise_too_small_to_account_for_is_refused(noise_multiplier: float, sampling: float) -> None:
    event = NoiseEvent(noise_multiplier=noise_multiplier, sampling_probability=sampling)
    with pytest.raises(GymError, match="so little noise gives no privacy") as caught:
        epsilon([event], DELTA)
    assert "raise noise_multiplier" in caught.value.hint


@pytest.mark.parametrize(("noise", "count"), [(0.02, 1000), (1.0, 10**7), (1.0, 10**9), (10.0, 10**11)])
def test_more_releases_than_memory_allows_are_bounded_from_above(noise: float, count: int) -> None:
    """A hub chooses noise and steps, and contributors account for them before they agree."""
    events = [NoiseEvent(noise_multiplier=noise, sampling_probability=0.05, count=count)]
    assert accountant_name(events, DELTA) == "rdp"
    fewer = [NoiseEvent(noise_multiplier=noise, sampling_probability=0.05, count=2)]
    assert epsilon(fewer, DELTA) < epsilon(events, DELTA) < math.inf
    many = [NoiseEvent(noise_multiplier=noise, sampling_probability=0.05, count=10**18)]
    assert epsilon(events, DELTA) < epsilon(many, DELTA) < math.inf, "what is spent can always be stated"


def test_what_many_releases_of_hardly_any_noise_spent_can_be_stated() -> None:
    events = [NoiseEvent(noise_multiplier=1e-4, count=count) for count in (1, 10**6)]
    assert epsilon(events[:1], DELTA) < epsilon(events, DELTA) < math.inf


def test_the_bound_of_many_releases_is_above_their_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [NoiseEvent(noise_multiplier=1.0, sampling_probability=0.05, count=20_000)]
    assert accountant_name(events, DELTA) == "pld"
    distribution = epsilon(events, DELTA)
    monkeypatch.setattr(accountant, "_MAX_PLD_RELEASES", 1)
    accountant._epsilon.cache_clear()
    assert distribution < epsilon(events, DELTA) < 3 * distribution
    accountant._epsilon.cache_clear()


def test_events_that_differ_in_every_round_are_merged_into_few_that_cost_no_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = [
        NoiseEvent(noise_multiplier=1 + 1e-4 * n, sampling_probability=0.01 + 1e-6 * n, count=5)
        for n in range(1000)
    ]
    merged = accountant._collected(rounds)
    assert len(merged) <= accountant._MAX_KINDS
    assert sum(event.count for event in merged) == 5000
    few = [event.model_copy(update={"count": 50}) for event in rounds[::100]]
    spent = accountant._renyi_epsilon(accountant._collected(few), 1e-5)
    monkeypatch.setattr(accountant, "_MAX_KINDS", 10)
    assert accountant._renyi_epsilon(accountant._collected(few), 1e-5) <= spent
    assert spent < 1.1 * accountant._renyi_epsilon(accountant._collected(few), 1e-5)
