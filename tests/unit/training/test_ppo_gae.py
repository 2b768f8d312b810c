"""Generalised advantages and token rewards: by hand, against a straight loop, and with padding."""

from __future__ import annotations

import pytest
import torch

from gym_fed.training.algorithms.rewards._ppo_trainer import generalised_advantages, token_rewards


def straight(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> tuple[list[float], list[float]]:
    """Equation 11 of Schulman et al. 2016, read literally: a weighted sum of k-step estimators' deltas."""
    ahead = [*values[1:], 0.0][: len(values)]
    deltas = [r + gamma * n - v for r, n, v in zip(rewards, ahead, values, strict=True)]
    advantages = [
        sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:])) for t in range(len(deltas))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]


def test_a_case_worked_by_hand() -> None:
    """Deltas: 1 + 0.5 * 2 - 4 = -2, 0 + 0.5 * 8 - 2 = 2, 3 - 8 = -5. Advantages with gamma * lambda = 0.25."""
    advantages, returns = generalised_advantages(
        torch.tensor([[1.0, 0.0, 3.0]]),
        torch.tensor([[4.0, 2.0, 8.0]]),
        torch.ones(1, 3),
        gamma=0.5,
        gae_lambda=0.5,
    )
    assert advantages.tolist() == [[-2 + 0.25 * 0.75, 2 - 0.25 * 5, -5]]
    assert returns.tolist() == [[2 + 0.25 * 0.75, 2.75, 3]]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.0), (0.97, 1.0), (1.0, 1.0)])
def test_answers_of_every_length_agree_with_a_straight_loop(gamma: float, lam: float) -> None:
    torch.manual_seed(0)
    lengths = [1, 2, 5, 9, 0]
    rewards, values = torch.randn(2, 5, 9, dtype=torch.float64)
    mask = (torch.arange(9) < torch.tensor(lengths).unsqueeze(1)).long()
    advantages, returns = generalised_advantages(rewards, values, mask, gamma=gamma, gae_lambda=lam)
    for row, length in enumerate(lengths):
        wanted = straight(rewards[row, :length].tolist(), values[row, :length].tolist(), gamma, lam)
        for got, want in zip((advantages, returns), wanted, strict=True):
            assert got[row, :length].tolist() == pytest.approx(want, rel=1e-12, abs=1e-12)
            assert not got[row, length:].any()


def test_the_score_is_at_the_last_token_and_every_token_pays_for_its_divergence() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    ratios = torch.tensor([[1.0, 2.0, 9.0], [0.0, -1.0, 1.0], [1.0, 1.0, 1.0]])
    rewards = token_rewards(torch.tensor([10.0, 20.0, 30.0]), ratios, mask, beta=0.5)
    assert rewards.tolist() == [[-0.5, 9.0, 0.0], [0.0, 0.5, 19.5], [0.0, 0.0, 0.0]]
