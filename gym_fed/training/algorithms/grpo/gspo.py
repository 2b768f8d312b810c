"""Group sequence policy optimisation: GRPO with one importance ratio for a whole answer.

Zheng et al. 2025, "Group Sequence Policy Optimization", equations 5 and 7. TRL's ``GRPOTrainer``.
"""

from __future__ import annotations

from typing import Any

from gym_fed.training.algorithms.grpo._rewarded import Rewarded
from gym_fed.training.run.job import Job


class Gspo(Rewarded):
    """The ratio is the geometric mean over the answer's tokens; losses are averaged answer by answer."""

    name = "gspo"
    tried = "full, LoRA"
    untried = "vLLM; several processes"

    def build(self, job: Job) -> Any:
        from trl import GRPOConfig

        from gym_fed.training.algorithms.grpo._trainers import GrpoRollouts, build_trainer

        arguments = GRPOConfig(
            **self.arguments(job, "scale_rewards", "entropy_coef"),
            importance_sampling_level="sequence",
            loss_type="grpo",
        )
        return build_trainer(GrpoRollouts, job, arguments, self.settings(job.config).beta)
