"""PPO's clipped objective and the clipped loss of its critic, token by token."""

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
        epsilon: How far below 1 the ratio may fall before its gradient ends.
        epsilon_high: How far above 1 it may rise.

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
