"""Group relative policy optimisation: an answer's advantage is its reward relative to other answers to its prompt.

Shao et al. 2024, "DeepSeekMath", section 4.1. Every token of an answer has the answer's advantage ``A``, which
``group_advantages`` computes. With ``r = pi / pi_old`` the loss of a token is (equations 3 and 4)

    -min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A) + beta * r * (pi_ref / pi - log(pi_ref / pi) - 1)

The paper's penalty has no factor ``r``; with it the gradient is that of the KL divergence (DeepSeek-AI 2025,
"DeepSeek-V3.2"). ``trl.trainer.grpo_trainer.GRPOTrainer._compute_loss`` computes it and averages by ``loss_type``.
``tests/unit/training/test_losses_on_the_page.py`` compares the trainer's loss with the formula.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from gym_fed.training.algorithms.rewards._rewarded import Rewarded
from gym_fed.training.run.job import Job

if TYPE_CHECKING:
    from torch import Tensor

_SMALLEST_DEVIATION = 1e-4


class Grpo(Rewarded):
    """GRPO, with the averages of DAPO, Dr. GRPO and BNPO as choices of ``loss_type``."""

    name = "grpo"
    tried = "full, LoRA, LoRA on vLLM; every grader"
    untried = "several processes"

    def build(self, job: Job) -> Any:
        from trl import GRPOConfig

        from gym_fed.training.algorithms.rewards._rollouts import GrpoRollouts, build_trainer

        settings = self.settings(job.config)
        arguments = GRPOConfig(**self.arguments(job, "loss_type", "scale_rewards", "entropy_coef"))
        trainer = build_trainer(GrpoRollouts, job, arguments, settings.beta)
        trainer.advantages = partial(group_advantages, scale=settings.scale_rewards)
        return trainer


def group_advantages(rewards: Tensor, *, scale: str) -> Tensor:
    """Return ``A = (r - mean(r)) / std(r)`` over the answers to one prompt: Shao et al. 2024, section 4.1.2.

    Args:
        rewards: ``[prompts, answers]`` float32, the sum of all graders.
        scale: The divisor: the standard deviation of the ``group`` (the paper) or of the ``batch`` (Hu et al. 2025,
            "REINFORCE++"), or ``none`` (Liu et al. 2025, "Dr. GRPO").

    Returns:
        ``[prompts, answers]``; 0 if all answers to a prompt have the same reward.
    """
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if scale == "group":
        return advantages / (rewards.std(dim=1, keepdim=True) + _SMALLEST_DEVIATION)
    if scale == "batch":
        return advantages / (rewards.std() + _SMALLEST_DEVIATION)
    return advantages
