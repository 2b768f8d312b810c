"""NEFTune, Jain et al. 2023: uniform noise of ``alpha / sqrt(length * width)`` on the embeddings while training."""

from __future__ import annotations

from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.training.features.base import Feature

ROLLOUTS = ("ppo", "grpo", "gspo", "rloo")


class NeftuneNoiseAlpha(Feature):
    """transformers' hook on the embedding, taken off at the end."""

    def check(self, config: TrainingConfig) -> None:
        if config.algorithm in ROLLOUTS:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"neftune_noise_alpha: {config.algorithm} generates its own answers, and the noise would be in them",
                "remove the key",
            )

    def arguments(self, config: TrainingConfig) -> dict[str, Any]:
        return {"neftune_noise_alpha": config.neftune_noise_alpha}
