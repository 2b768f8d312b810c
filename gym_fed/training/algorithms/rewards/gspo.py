"""Group sequence policy optimisation: GRPO with one importance ratio per answer.

Zheng et al. 2025, "Group Sequence Policy Optimization". The ratio of an answer ``y`` is ``s = exp(mean over tokens of
log(pi / pi_old))`` (equation 7), and its loss ``-min(s * A, clip(s, 1 - epsilon, 1 + epsilon_high) * A)`` (equation
5), with ``A`` by ``group_advantages`` of ``grpo.py`` (equation 6).
``trl.trainer.grpo_trainer.GRPOTrainer._compute_loss`` computes ratio and loss.
``tests/unit/training/test_losses_on_the_page.py`` compares the trainer's loss with the formula.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from gym_fed.training.algorithms.rewards._rewarded import Rewarded
from gym_fed.training.algorithms.rewards.grpo import group_advantages
from gym_fed.training.run.job import Job


class Gspo(Rewarded):
    """GSPO: the ratio of an answer is the geometric mean over its tokens, and losses are averaged over answers."""

    name = "gspo"
    tried = "full, LoRA, LoRA on vLLM"
    untried = "several processes"

    def build(self, job: Job) -> Any:
        from trl import GRPOConfig

        from gym_fed.training.algorithms.rewards._rollouts import GrpoRollouts, build_trainer

        shared = self.arguments(job, "scale_rewards", "entropy_coef")
        arguments = GRPOConfig(**shared, importance_sampling_level="sequence", loss_type="grpo")
        settings = self.settings(job.config)
        trainer = build_trainer(GrpoRollouts, job, arguments, settings.beta)
        trainer.advantages = partial(group_advantages, scale=settings.scale_rewards)
        return trainer
