"""The scheduler bounds the prefill of a step by the measured cost of steps."""

from __future__ import annotations

import random

import pytest

from gym_fed.serving.engine.scheduler import StepCost

MOST = 512


def seconds(decode: int, prefill: int, chance: random.Random, jump: float = 0.0) -> float:
    """A step of a machine: the weights are read once, a token costs 1 ms, and 10% of noise."""
    alone = 0.060 + 0.001 * decode + (jump if prefill else 0.0)
    return (alone + 0.001 * prefill) * chance.uniform(0.95, 1.05)


@pytest.mark.parametrize("jump", [0.0, 0.02])
def test_a_prompt_beside_answers_fills_steps_up_to_the_stretch(jump: float) -> None:
    chance = random.Random(1)
    cost = StepCost(1.8)
    for _ in range(5):
        cost.observe(3, 0, seconds(3, 0, chance))
    left, sizes, times = 1500, [], []
    while left:
        tokens = cost.prefill_tokens(3, min(MOST, left))
        spent = seconds(3, tokens, chance, jump)
        cost.observe(3, tokens, spent)
        left -= tokens
        sizes.append(tokens)
        times.append(spent)
    assert max(times) < 2 * 0.063
    assert sum(sizes[5:25]) / 20 == pytest.approx((0.8 * 0.063 - jump) / 0.001, rel=0.15)


def test_prefill_alone_takes_all_tokens_of_a_step() -> None:
    cost = StepCost(1.8)
    assert cost.prefill_tokens(0, MOST) == MOST
    cost.observe(0, MOST, 9.0)
    assert cost.prefill_tokens(0, MOST) == MOST


def test_without_a_stretch_only_the_tokens_of_a_step_limit_it() -> None:
    cost = StepCost(None)
    cost.observe(3, 0, 0.1)
    assert cost.prefill_tokens(3, MOST) == MOST


def test_a_first_step_beside_answers_is_measured_without_prefill() -> None:
    cost = StepCost(2.0)
    assert cost.prefill_tokens(2, MOST) == 0
    cost.observe(2, 0, 0.05)
    assert cost.prefill_tokens(2, MOST) == 16
    assert cost.prefill_tokens(2, 5) == 5


def test_prefill_advances_however_slow_it_is_and_is_measured_without_now_and_then() -> None:
    cost = StepCost(1.5)
    cost.observe(2, 0, 0.05)
    sizes = []
    for _ in range(80):
        tokens = cost.prefill_tokens(2, MOST)
        sizes.append(tokens)
        cost.observe(2, tokens, 5.0 if tokens else 0.05)
    assert sizes.count(0) == 4
    assert min(size for size in sizes if size) == 5


def test_one_slow_step_does_not_lengthen_the_later_ones() -> None:
    cost = StepCost(2.0)
    for _ in range(20):
        cost.observe(1, 0, 0.01)
        cost.observe(1, 10, 0.02)
    before = cost.prefill_tokens(1, MOST)
    cost.observe(1, 0, 10.0)
    assert cost.prefill_tokens(1, MOST) <= 1.5 * before


def test_prompts_whose_answers_join_may_lengthen_a_step_as_those_will() -> None:
    cost = StepCost(1.8)
    for _ in range(20):
        cost.observe(8, 0, 0.030)
        cost.observe(1, 0, 0.010)
        cost.observe(1, 60, 0.070)
    assert cost.prefill_tokens(1, MOST, joining=1) == 8
    assert cost.prefill_tokens(1, MOST, joining=8) == pytest.approx((1.8 * 0.030 - 0.010) / 0.001, abs=1)
