"""Direct preference optimisation, Rafailov et al. 2023, equation 7, and the other losses of TRL's ``DPOTrainer``."""

from __future__ import annotations

from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.data.rows import Row
from gym_fed.training.algorithms._preference import (
    build_on_ids,
    check_preference,
    cut_answers,
    encode_answers,
    precompute,
)
from gym_fed.training.algorithms.base import Algorithm
from gym_fed.training.job import Job


class Dpo(Algorithm):
    """The policy's log-ratio to the reference grows for chosen answers against rejected ones."""

    row_kind = "preference"

    def check(self, config: TrainingConfig) -> None:
        check_preference(config)

    def encode(self, config: TrainingConfig, tokenizer: Any, rows: list[Row]) -> list[dict[str, Any]]:
        """See ``cut_answers`` for rows longer than ``max_length``."""
        return cut_answers(encode_answers(tokenizer, rows, ("chosen", "rejected")), config.max_length)

    def build(self, job: Job) -> Any:
        from trl import DPOConfig, DPOTrainer

        settings = job.config.dpo
        assert settings is not None  # filled in by the config
        values = settings.model_dump(exclude={"precompute_ref_log_probs"})
        arguments = DPOConfig(
            **job.arguments(),
            **values,
            max_length=None,  # cut already
            precompute_ref_log_probs=precompute(job, settings.precompute_ref_log_probs),
        )
        return build_on_ids(job, DPOTrainer, arguments, reference=True)
