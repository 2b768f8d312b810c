"""REINFORCE leave-one-out: an answer's baseline is the mean reward of the other answers to the same prompt.

Ahmadian et al. 2024, "Back to Basics", section 3.2. TRL's ``RLOOTrainer``.
"""

from __future__ import annotations

from typing import Any

from gym_fed.training.algorithms.grpo._rewarded import Rewarded
from gym_fed.training.run.job import Job


class Rloo(Rewarded):
    """RLOO; the KL to the model at the start is subtracted from the reward."""

    name = "rloo"
    tried = "full, LoRA"
    untried = "vLLM; several processes"

    def build(self, job: Job) -> Any:
        from trl import RLOOConfig

        from gym_fed.training.algorithms.grpo._trainers import RlooRollouts, build_trainer

        names = ("normalize_advantages", "reward_clip_range")
        return build_trainer(
            RlooRollouts, job, RLOOConfig(**self.arguments(job, *names)), self.settings(job.config).beta
        )
