"""The mathematics of PPO, token by token: rewards, advantages, the clipped objective, and the critic's loss."""

from __future__ import annotations

import torch


def clipped_objective(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    epsilon: float,
    epsilon_high: float,
) -> torch.Tensor:
    """``L_CLIP = min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)`` with ``r = pi / pi_old``.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7; it is maximised.

    Args:
        log_probs: ``[B, T]`` of the answers' tokens under the policy.
        old_log_probs: The same under the policy that wrote the answers.
        advantages: ``[B, T]``.
        epsilon: Distance below 1 at which the ratio loses its gradient.
        epsilon_high: Distance above 1 at which it does.

    Returns:
        ``[B, T]``.
    """
    ratios = torch.exp(log_probs - old_log_probs)
    clipped = ratios.clamp(1 - epsilon, 1 + epsilon_high)
    return torch.minimum(ratios * advantages, clipped * advantages)


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, cliprange: float
) -> torch.Tensor:
    """``L_VF = max((V - R)**2, (clip(V, V_old - c, V_old + c) - R)**2) / 2``.

    The squared error of Schulman et al. 2017, equation 9, clipped as in the authors' ``baselines`` (``ppo2``).

    Args:
        values: ``[B, T]`` of the critic.
        old_values: The same when the answers were written.
        returns: ``[B, T]``: advantages plus old values.
        cliprange: ``c``.

    Returns:
        ``[B, T]``.
    """
    clipped = old_values + (values - old_values).clamp(-cliprange, cliprange)
    return 0.5 * torch.maximum((values - returns).square(), (clipped - returns).square())


def generalised_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantage and the return of each token.

    ``A[t] = delta[t] + gamma * lambda * A[t + 1]`` with ``delta[t] = rewards[t] + gamma * values[t + 1] -
    values[t]``; after the last token all are 0. Schulman et al. 2016, "High-Dimensional Continuous Control Using
    Generalized Advantage Estimation", equation 16 as a recursion.

    Args:
        rewards: ``[B, T]``, given for each token.
        values: ``[B, T]``, the critic's estimate before each token.
        mask: ``[B, T]``, 1 at tokens and 0 at the padding after them.
        gamma: Discount of later rewards.
        gae_lambda: 0 is ``delta`` alone, 1 the sum of all rewards to come less the value.

    Returns:
        Advantages and returns (advantage + value), each ``[B, T]`` in the type of ``rewards``; 0 at the padding.
    """
    mask = mask.to(rewards.dtype)
    rewards, values = rewards * mask, values * mask
    advantages = torch.zeros_like(rewards)
    ahead = next_value = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        ahead = (delta + gamma * gae_lambda * ahead) * mask[:, t]
        advantages[:, t] = ahead
        next_value = values[:, t]
    return advantages, advantages + values


def token_rewards(
    scores: torch.Tensor, log_ratios: torch.Tensor, mask: torch.Tensor, *, beta: float
) -> torch.Tensor:
    """Return ``-beta * log(pi / pi_ref)`` at every token, plus the answer's score at its last token.

    Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", equation 2, token by token.

    Args:
        scores: ``[B]``, of whole answers.
        log_ratios: ``[B, T]``, log-probability under the policy less that under the reference.
        mask: ``[B, T]``, 1 at tokens and 0 at the padding after them.
        beta: Weight of the penalty.

    Returns:
        ``[B, T]``, 0 at the padding.
    """
    mask = mask.to(scores.dtype)
    rewards = -beta * log_ratios * mask
    last = mask.sum(dim=1).long().sub(1).clamp(min=0).unsqueeze(1)
    return rewards.scatter_add(1, last, scores.unsqueeze(1) * mask.gather(1, last))
