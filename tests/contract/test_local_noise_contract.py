"""Local privacy under every aggregation rule: what a rule makes of a noised update tells no more than its epsilon.

One of seven contributors takes a step of DP-SGD with or without one example. An attacker who knows all else sees the
soup and guesses which. Whatever the rule, its true positive rate is at most ``exp(epsilon)`` times its false positive
rate plus delta: rules are post-processing.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import beta
from torch import Tensor

from gym_fed.config.hub.server import ServerConfig
from gym_fed.config.hub.soup import SoupRecipe
from gym_fed.core.registries import AGGREGATORS
from gym_fed.privacy.accountant import NoiseEvent, epsilon
from gym_fed.soup.building import build_aggregator
from gym_fed.soup.gram import Needs

TRIALS, SIZE, CONTRIBUTORS = 60, 6, 7
NOISE, DELTA = NoiseEvent(noise_multiplier=4.0), 1e-5
RULES = {name: int(AGGREGATORS.type_of(name).robust) for name in AGGREGATORS.names()}
"""Every rule, and the malicious clients that it must withstand."""


def soups(name: str, example: bool, noise_multiplier: float) -> Tensor:
    """``[TRIALS]``: the soup along the example's gradient, whose norm is the clip, 1."""
    generator = torch.Generator().manual_seed(int(example))
    others = torch.randn(CONTRIBUTORS - 1, SIZE, generator=torch.Generator().manual_seed(9))
    others[:, 0] += 1.0
    root = others.mean(0)
    rule = build_aggregator(SoupRecipe(aggregator=name, num_malicious_nodes=RULES[name]))
    given = root if rule.needs is Needs.ROOT else None
    gradient = torch.nn.functional.one_hot(torch.tensor(0), SIZE).float()
    own = 0.5 * others[0] + (gradient if example else 0.0)
    found = []
    for _ in range(TRIALS):
        noised = own + noise_multiplier * torch.randn(SIZE, generator=generator)
        soup = rule.aggregate(torch.cat([noised[None], others]), torch.ones(CONTRIBUTORS), given)
        found.append(float(soup[0]))
    return torch.tensor(found)


def betrayed(with_example: Tensor, without: Tensor, bound: float) -> bool:
    """True if some threshold tells the two apart better than ``bound`` allows, beyond chance (1 in 10,000)."""

    def limit(hits: int, upper: bool) -> float:
        if hits == (TRIALS if upper else 0):
            return float(upper)
        tail = (
            beta.ppf(1 - 5e-5, hits + 1, TRIALS - hits) if upper else beta.ppf(5e-5, hits, TRIALS - hits + 1)
        )
        return float(tail)

    for threshold in torch.cat([with_example, without]):
        right, wrong = (int((one >= threshold).sum()) for one in (with_example, without))
        for true, false in ((right, wrong), (TRIALS - wrong, TRIALS - right)):
            if limit(true, upper=False) > math.exp(bound) * limit(false, upper=True) + DELTA:
                return True
    return False


@pytest.mark.few(6, "the noise is added before any rule")
@pytest.mark.parametrize("name", RULES)
def test_no_rule_tells_more_of_a_noised_update_than_its_epsilon(name: str) -> None:
    spent = epsilon([NOISE], DELTA)
    assert spent < 1.0
    assert not betrayed(
        soups(name, True, NOISE.noise_multiplier), soups(name, False, NOISE.noise_multiplier), spent
    )


@pytest.mark.parametrize("name", ["mean", "byzantine_robust", "fltrust", "root_gate"])
def test_without_noise_the_same_guess_betrays_the_example(name: str) -> None:
    assert betrayed(soups(name, True, 0.0), soups(name, False, 0.0), epsilon([NOISE], DELTA))


@pytest.mark.parametrize("name", RULES)
def test_a_hub_takes_local_privacy_under_every_rule(name: str) -> None:
    needs_root = AGGREGATORS.type_of(name).needs_root()
    config = {
        "soup": {"aggregator": name, "num_malicious_nodes": 0},
        "recipe": {"privacy": {"noise_multiplier": 1.0}},
        **({"root": {"data": "root.jsonl"}} if needs_root else {}),
    }
    assert ServerConfig.model_validate(config).recipe.privacy is not None
