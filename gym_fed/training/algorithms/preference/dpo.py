"""Direct preference optimisation, Rafailov et al. 2023, equation 7, and the other losses of TRL's ``DPOTrainer``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from gym_fed.training.algorithms.preference._answers import (
    Pairs,
    build_on_ids,
    precompute,
)
from gym_fed.training.run.job import Job


class Dpo(Pairs):
    """The policy's log-ratio to the reference grows for chosen answers against rejected ones."""

    uses_reference = True
    federates = True
    # Alone, DPO on a few dozen pairs makes both answers unlikely: of 30 pairs gym-nano learnt to say neither.
    of_few_rows = MappingProxyType({"loss_type": ["sigmoid", "sft"]})
    tried = "full, LoRA; federated rounds with both; two processes"
    untried = "pictures"

    def build(self, job: Job) -> Any:
        from trl import DPOConfig

        from gym_fed.training.algorithms.preference._trainers import DpoMeans

        settings = self.settings(job.config)
        values = settings.model_dump(exclude={"precompute_ref_log_probs"})
        arguments = DPOConfig(
            **job.arguments(),
            **values,
            max_length=None,  # cut already
            precompute_ref_log_probs=precompute(job, settings.precompute_ref_log_probs),
        )
        return build_on_ids(job, DpoMeans, arguments, reference=True)
