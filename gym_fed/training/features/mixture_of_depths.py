"""Converts a dense model to Mixture-of-Depths before training; the routers are trained and saved with it."""

from __future__ import annotations

from typing import Any

from gym_fed.config.training import TrainingConfig
from gym_fed.errors import ErrorCode, GymError
from gym_fed.training.features._passes import reference_mode, writes_answers
from gym_fed.training.features.base import Feature


class MixtureOfDepths(Feature):
    """Own code; see ``gym_fed.modeling.mixture_of_depths``."""

    def check(self, config: TrainingConfig) -> None:
        problem = None
        if config.finetuning != "full":
            problem = f"finetuning: {config.finetuning} would not train the routers"
        elif config.algorithm == "reward_model" or writes_answers(config):
            problem = f"{config.algorithm} needs a model that all blocks and a cache belong to"
        elif reference_mode(config) is not None:
            problem = f"the reference of {config.algorithm} would send other tokens through the blocks than the policy"
        elif config.torch_compile:
            problem = "torch_compile cannot compile blocks whose number of tokens follows from the data"
        elif config.unsloth:
            problem = "unsloth brings blocks of its own"
        if problem is not None:
            raise GymError(
                ErrorCode.CONFIG_INVALID,
                f"mixture_of_depths: {problem}",
                "use finetuning: full with sft or pretrain, and no compilation",
            )

    def apply(self, model: Any, config: TrainingConfig) -> None:
        from gym_fed.modeling.mixture_of_depths import convert_to_mixture_of_depths

        assert config.mixture_of_depths is not None  # the feature is on
        convert_to_mixture_of_depths(model, **config.mixture_of_depths.model_dump(), seed=config.seed)
