"""NEFTune, Jain et al. 2023: uniform noise of ``alpha / sqrt(length * width)`` on the embeddings during training."""

from __future__ import annotations

from typing import Any

from gym_fed.config.train.training import TrainingConfig
from gym_fed.core.errors import refuse_first
from gym_fed.training.features.base import Feature, reference_mode, writes_answers


class NeftuneNoiseAlpha(Feature):
    """Uses transformers' hook on the embedding, which is removed after training."""

    tried = "yes"

    def check(self, config: TrainingConfig) -> None:
        shared = f"the reference of {config.algorithm} is this model without its adapter, and would get the noise too"
        refuse_first(
            (writes_answers(config), f"{config.algorithm} would generate its answers with the noise"),
            (
                reference_mode(config) in ("training", "either"),
                shared,
                "remove the key, or use finetuning: full",
            ),
            prefix="neftune_noise_alpha: ",
            remedy="remove the key",
        )

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        return {"neftune_noise_alpha": config.neftune_noise_alpha}
