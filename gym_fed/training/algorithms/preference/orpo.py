"""Odds-ratio preference optimisation, Hong et al. 2024, equations 6 and 7; TRL's experimental ``ORPOTrainer``."""

from __future__ import annotations

from typing import Any

from gym_fed.training.algorithms.preference._answers import build_on_ids
from gym_fed.training.algorithms.preference._whole_pairs import WholePairs, tokenised
from gym_fed.training.run.job import Job


class Orpo(WholePairs):
    """Learns the chosen answer with its prompt (next-token loss) and an odds ratio against the rejected one."""

    federates = True
    tried = "full, LoRA; two processes"
    untried = "pictures"

    def build(self, job: Job) -> Any:
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        settings = self.settings(job.config)
        arguments = ORPOConfig(
            **job.arguments(),
            **settings.model_dump(),
            max_length=job.config.max_length,
            remove_unused_columns=False,
        )
        return build_on_ids(job, tokenised(ORPOTrainer), arguments, reference=False)
