"""REINFORCE leave-one-out: an answer's baseline is the mean reward of the other answers to its prompt.

Ahmadian et al. 2024, "Back to Basics", section 3.2. Of ``k`` answers, the ``i``-th has the advantage ``A_i = R_i -
sum(R_j for j != i) / (k - 1)``, where ``R`` is the sum of the graders less ``beta`` times the answer's ``log(pi /
pi_ref)``. ``trl.trainer.rloo_trainer.RLOOTrainer._generate_and_score_completions`` computes it, and
``RLOOTrainer._compute_loss`` the loss ``-min(r * A, clip(r, 1 - epsilon, 1 + epsilon_high) * A)`` with the whole
answer's ratio ``r = pi / pi_old``. ``tests/unit/training/test_losses_on_the_page.py`` compares both with the formula.
"""

from __future__ import annotations

from typing import Any

from gym_fed.training.algorithms.rewards._rewarded import Rewarded
from gym_fed.training.run.job import Job


class Rloo(Rewarded):
    """RLOO; the KL to the initial model is subtracted from the reward."""

    name = "rloo"
    tried = "full, LoRA, LoRA on vLLM"
    untried = "several processes"

    def build(self, job: Job) -> Any:
        from trl import RLOOConfig

        from gym_fed.training.algorithms.rewards._rollouts import RlooRollouts, build_trainer

        arguments = RLOOConfig(**self.arguments(job, "normalize_advantages", "reward_clip_range"))
        return build_trainer(RlooRollouts, job, arguments, self.settings(job.config).beta)
