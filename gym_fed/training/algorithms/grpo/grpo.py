"""Group relative policy optimisation: an answer's advantage is its reward against other answers to the same prompt.

Shao et al. 2024, "DeepSeekMath", equations 19 to 21. TRL's ``GRPOTrainer``.
"""

from __future__ import annotations

from typing import Any

from gym_fed.training.algorithms.grpo._rewarded import Rewarded
from gym_fed.training.run.job import Job


class Grpo(Rewarded):
    """GRPO, with the averages of DAPO, Dr. GRPO and BNPO by ``loss_type``."""

    name = "grpo"
    tried = "full, LoRA; every grader"
    untried = "vLLM; several processes"

    def build(self, job: Job) -> Any:
        from trl import GRPOConfig

        from gym_fed.training.algorithms.grpo._trainers import GrpoRollouts, build_trainer

        names = ("loss_type", "scale_rewards", "entropy_coef")
        return build_trainer(
            GrpoRollouts, job, GRPOConfig(**self.arguments(job, *names)), self.settings(job.config).beta
        )
