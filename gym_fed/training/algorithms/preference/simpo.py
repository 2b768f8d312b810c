"""Simple preference optimisation, Meng et al. 2024, equation 6; TRL's experimental ``CPOTrainer``.

``-log sigmoid(beta * (mean log pi(y_w|x) - mean log pi(y_l|x)) - gamma)``, and ``cpo_alpha`` times the chosen answer's
next-token loss.
"""

from __future__ import annotations

from typing import Any

from gym_fed.training.algorithms.preference._answers import build_on_ids
from gym_fed.training.algorithms.preference._whole_pairs import WholePairs, tokenised
from gym_fed.training.run.job import Job


class Simpo(WholePairs):
    """The reward is the mean log-probability itself: no reference model."""

    federates = True
    tried = "full, LoRA"
    untried = "pictures; several processes"

    def build(self, job: Job) -> Any:
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        settings = self.settings(job.config)
        arguments = CPOConfig(
            **job.arguments(),
            **settings.model_dump(exclude={"gamma"}),
            simpo_gamma=settings.gamma,
            loss_type="simpo",
            max_length=job.config.max_length,
            remove_unused_columns=False,
        )
        return build_on_ids(job, tokenised(CPOTrainer), arguments, reference=False)
